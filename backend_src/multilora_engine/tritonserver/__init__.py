"""Runs NVIDIA's tritonserver over our model repository: start, readiness by a real inference, log, shutdown."""

from multilora_engine.tritonserver.options import ServerOptions
from multilora_engine.tritonserver.server_process import ServerFailed, ServerProcess

__all__ = ["ServerFailed", "ServerOptions", "ServerProcess"]
