"""Runs NVIDIA's tritonserver over our model repository: start, readiness by a real inference, log, shutdown.

launch                                     `multilora-serve`: starts a server, and starts it again when it dies or hangs
server_process                             `ServerProcess`: one server, from its checks to the removal of its last trace
  arguments                                its options, its ports, its command line with limits on clients
  request_guard                            a library in the server that refuses requests which would end it
  installation, checkpoint                 where it is, the checkpoint, room in /dev/shm
  log, shared_memory                       its log, its files
probe                                      readiness and liveness by a real inference
repository, template, upstream_models      the model repository: parameters, TensorRT-LLM's templates and model names
"""

from multilora_engine.tritonserver.arguments import ServerOptions
from multilora_engine.tritonserver.server_process import ServerFailed, ServerProcess

__all__ = ["ServerFailed", "ServerOptions", "ServerProcess"]
