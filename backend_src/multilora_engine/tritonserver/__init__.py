"""Runs NVIDIA's tritonserver over our model repository: start, readiness by a real inference, log, shutdown."""

from multilora_engine.tritonserver.process import ServerFailed, ServerOptions, ServerProcess

__all__ = ["ServerFailed", "ServerOptions", "ServerProcess"]
