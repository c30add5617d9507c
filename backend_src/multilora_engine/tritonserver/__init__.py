"""Runs NVIDIA's tritonserver over our model repository: start, readiness by a real inference, log, shutdown.

launch                                     `multilora-serve`: starts a server, and starts it again when it dies or hangs
server_process                             `ServerProcess`: one server, from its checks to the removal of its last trace
  options, arguments, addresses            its options, its command line, its ports
  hardening, request_guard, tracing        its limits on clients, its traces
  installation, checkpoint, free_space     where it is, the checkpoint, room in /dev/shm
  log, shared_memory, marked_processes     its log, its files, its processes
probe, grpc_probe                          readiness and liveness by a real inference
repository, template, upstream_models      the model repository: parameters, TensorRT-LLM's templates and model names
"""

from multilora_engine.tritonserver.options import ServerOptions
from multilora_engine.tritonserver.server_process import ServerFailed, ServerProcess

__all__ = ["ServerFailed", "ServerOptions", "ServerProcess"]
