"""Client of a multilora server: generate, stream, send LoRA adapters; converter for PEFT adapters. Never imports torch.

>>> from multilora_client import Client, load_adapter
>>> with Client("grpc://localhost:8001") as client:
...     print(client.generate("Who are you?", adapter=load_adapter("adapters/pirate")).text)

client                                     `Client` and `AsyncClient`: thin shells around the parts below
  messages, tensors                        requests and responses as named tensors
  calls                                    which adapters the server has, and when to send weights again
  generation_inputs, options               the input tensors of a generation, from its options
  answers, generation                      responses as `Generation` and `Chunk`
  operations, tokens                       operators' requests; text to token ids and back
doors                                      `Door`: the server's models that answer
transport                                  the four methods between client and network
  grpc_transport, http_transport           Triton's two protocols
  keyed_transport, keys, tls               API keys, their permissions, certificates
adapter, convert                           an adapter as the wire carries it, from a directory
  base_weights                             the base's weights, for DoRA
sizing                                     the memory that adapters take in a server
errors                                     every error that is raised on purpose
cli, terminal                              the command `multilora`, and what all its commands share
  adapters_cli, weights_cli                its groups of commands
  quantize_command                         `multilora quantize`, which the engine carries out
  doctor                                   `multilora doctor`: what works on a machine, and what does not
openai, console, bench                     commands with parts of their own
"""

from multilora_client.adapter import Adapter, AdapterFiles, AdapterTensors
from multilora_client.client import AsyncClient, Client
from multilora_client.convert import convert_peft, load_adapter
from multilora_client.doors import DIRECT, ENSEMBLE, Door
from multilora_client.errors import (
    AdapterConflict,
    AdapterError,
    AdapterNotFound,
    CacheFull,
    Cancelled,
    InvalidRequest,
    MultiloraClientError,
    NotFound,
    PermissionDenied,
    RateExceeded,
    ServerFault,
    ServerUnreachable,
    TimedOut,
    Unauthenticated,
    Unavailable,
    Unsupported,
    parse_error,
)
from multilora_client.generation import Alternative, Chunk, Generation, PromptTokens
from multilora_client.messages import InferRequest, Response
from multilora_client.operations import AdapterEvents, ModelInfo
from multilora_client.options import ChatOptions, GenerateOptions, Message
from multilora_client.tls import Tls
from multilora_client.transport import AsyncMockTransport, AsyncTransport, MockTransport, Transport
from multilora_wire.adapter_event import AdapterEvent
from multilora_wire.adapter_info import AdapterInfo
from multilora_wire.layout import AdapterLayout

__all__ = [
    "DIRECT",
    "ENSEMBLE",
    "Adapter",
    "AdapterConflict",
    "AdapterError",
    "AdapterEvent",
    "AdapterEvents",
    "AdapterFiles",
    "AdapterInfo",
    "AdapterLayout",
    "AdapterNotFound",
    "AdapterTensors",
    "Alternative",
    "AsyncClient",
    "AsyncMockTransport",
    "AsyncTransport",
    "CacheFull",
    "Cancelled",
    "ChatOptions",
    "Chunk",
    "Client",
    "Door",
    "GenerateOptions",
    "Generation",
    "InferRequest",
    "InvalidRequest",
    "Message",
    "MockTransport",
    "ModelInfo",
    "MultiloraClientError",
    "NotFound",
    "PermissionDenied",
    "PromptTokens",
    "RateExceeded",
    "Response",
    "ServerFault",
    "ServerUnreachable",
    "TimedOut",
    "Tls",
    "Transport",
    "Unauthenticated",
    "Unavailable",
    "Unsupported",
    "convert_peft",
    "load_adapter",
    "parse_error",
]
