"""Client of a multilora server: generate, stream, send LoRA adapters; converter for PEFT adapters. Never imports torch.

>>> from multilora_client import Client, load_adapter
>>> with Client("grpc://localhost:8001") as client:
...     print(client.generate("Who are you?", adapter=load_adapter("adapters/pirate")).text)
"""

from multilora_client.adapter import Adapter, AdapterTensors
from multilora_client.client import AsyncClient, Client
from multilora_client.convert import convert_peft, load_adapter, load_adapter_tensors
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
    "load_adapter_tensors",
    "parse_error",
]
