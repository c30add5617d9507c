"""A PEFT adapter on a tiny model, and a fake Triton on a loopback port, for the tests of the client."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from tritonclient.grpc import service_pb2, service_pb2_grpc

from multilora_client import AdapterTensors
from multilora_wire.sites import decoder_sites

SAVED_SITES = decoder_sites(num_layers=2, hidden_size=24, q_size=40, kv_size=20, intermediate_size=56)
"""Of the model of `save_adapter`."""

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class SavedAdapter:
    """A PEFT model and the directory that its adapter was saved to."""

    model: PeftModel
    directory: Path

    def modules(self) -> dict[str, torch.nn.Module]:
        """Adapted layers by name, as `self_attn.q_proj` of layer 1 -> `1.self_attn.q_proj`."""
        return {
            name.partition("layers.")[2]: module
            for name, module in self.model.named_modules()
            if hasattr(module, "lora_A")
        }


@pytest.fixture
def save_adapter(tmp_path: Path) -> Callable[..., SavedAdapter]:
    """Make a random adapter with PEFT and save it. Sizes are odd on purpose, and q is wider than the hidden size."""

    def save(dtype: torch.dtype = torch.float32, **lora_config: Any) -> SavedAdapter:
        torch.manual_seed(7)
        config = LlamaConfig(
            vocab_size=11,
            hidden_size=24,
            intermediate_size=56,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=10,
        )
        arguments = {"r": 5, "lora_alpha": 11, "target_modules": ALL_LINEAR, "init_lora_weights": False} | lora_config
        model = get_peft_model(LlamaForCausalLM(config), LoraConfig(**arguments))
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(dtype)
        model.save_pretrained(tmp_path / "peft")
        return SavedAdapter(model, tmp_path / "peft")

    return save


@pytest.fixture
def small_tensors() -> AdapterTensors:
    """Two rows: module 1 of layer 0 with rank 2, module 3 of layer 1 with rank 1."""
    weights = np.arange(14, dtype=np.float16).reshape(2, 7)
    return AdapterTensors(weights, np.array([[1, 0, 2, 0], [3, 1, 1, 0]], np.int32), "FP16")


@dataclass
class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Knows the protocol and nothing of language models: it answers with `words`, and keeps adapters by task id.

    refusal: the error that answers every prompt.
    report: what the model `adapters` answers; to `layout` with the sites of SAVED_SITES, if it has no layout. An
        empty one tells no `stats` either.
    received: (model, inputs) of every request but those, in order; headers: those of each, in the same order. endless:
    streams go on until they are cancelled.
    was_left_early: whether a client that had its last word left before the server had closed the stream.
    """

    words: tuple[str, ...] = ("Ahoy", ", ", "café")
    endless: bool = False
    refusal: str = ""
    report: dict[str, Any] = field(default_factory=dict)
    received: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    adapters: set[int] = field(default_factory=set)
    cancelled: threading.Event = field(default_factory=threading.Event)
    was_left_early: bool | None = None
    url: str = ""

    def ModelInfer(self, request: Any, context: grpc.ServicerContext) -> Any:
        inputs = self._receive(request, context)
        if request.model_name == "adapters":
            operation = json.loads(inputs["request"][0])["operation"]
            default = {"layout": {"layout": {"sites": asdict(SAVED_SITES)}}, "stats": {}}.get(operation)
            if default is None or (operation in self.report if operation == "layout" else self.report):
                return self._report(self.report)
            self.received.pop()
            self.headers.pop()
            return self._report(default)
        if error := self._error(inputs):
            context.abort(grpc.StatusCode.NOT_FOUND, error)
        is_upload = "text_input" not in inputs and "messages" not in inputs
        return self._response(inputs, "" if is_upload else "".join(self.words), is_final=True)

    def ModelStreamInfer(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        request = next(requests)
        inputs = self._receive(request, context)
        context.add_callback(self.cancelled.set)
        if error := self._error(inputs):
            yield service_pb2.ModelStreamInferResponse(error_message=f"in ensemble 'ensemble', {error}")
        elif "stop" in inputs:
            yield self._stream_response(service_pb2.ModelInferResponse(), is_final=True)
        elif self.endless:
            while not self.cancelled.is_set():
                yield self._stream_response(self._response(inputs, "more ", is_final=False), is_final=False)
        else:
            for index, word in enumerate(self.words):
                is_final = index == len(self.words) - 1
                yield self._stream_response(self._response(inputs, word, is_final=is_final), is_final=is_final)
            self.was_left_early = self.cancelled.wait(0.1)

    def _receive(self, request: Any, context: grpc.ServicerContext) -> dict[str, Any]:
        inputs = {
            tensor.name: _decode(tensor.datatype, tensor.shape, data)
            for tensor, data in zip(request.inputs, request.raw_input_contents, strict=True)
        }
        self.received.append((request.model_name, inputs))
        self.headers.append(dict(context.invocation_metadata()))
        return inputs

    def _error(self, inputs: dict[str, Any]) -> str | None:
        if self.refusal:
            return self.refusal
        if "lora_task_id" not in inputs:
            return None
        task = int(inputs["lora_task_id"].item())
        if "lora_config" in inputs or "lora_peft_config" in inputs:
            self.adapters.add(task)
        if task in self.adapters:
            return None
        return f"[NOT_FOUND] LoRA task {task} not found in cache. Please send LoRA weights with request (request r1)"

    @staticmethod
    def _report(report: dict[str, Any]) -> Any:
        response = service_pb2.ModelInferResponse()
        _add_string(response, "response", json.dumps(report))
        return response

    def _response(self, inputs: dict[str, Any], text: str, *, is_final: bool) -> Any:
        response = service_pb2.ModelInferResponse()
        _add_string(response, "text_output", text)
        _add_string(response, "finish_reason", "stop" if is_final else "")
        if "lora_task_id" in inputs:
            response.outputs.add(name="lora_task_id_out", datatype="UINT64", shape=[1, 1])
            response.raw_output_contents.append(struct.pack("<Q", inputs["lora_task_id"].item()))
            _add_string(response, "lora_digest", "ab" * 32)
        return response

    @staticmethod
    def _stream_response(response: Any, *, is_final: bool) -> Any:
        response.parameters["triton_final_response"].bool_param = is_final
        return service_pb2.ModelStreamInferResponse(infer_response=response)


@pytest.fixture
def fake_triton() -> Iterator[FakeTriton]:
    """A FakeTriton that listens at its `url`."""
    triton = FakeTriton()
    server = grpc.server(ThreadPoolExecutor(4))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(triton, server)
    triton.url = f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield triton
    server.stop(grace=None).wait()


def _decode(datatype: str, shape: list[int], data: bytes) -> Any:
    if datatype != "BYTES":
        numpy_type = {
            "BOOL": "?",
            "UINT8": "u1",
            "INT32": "<i4",
            "UINT64": "<u8",
            "FP16": "<f2",
            "FP32": "<f4",
            "BF16": "<u2",
        }
        return np.frombuffer(data, numpy_type[datatype]).reshape(shape)
    values, offset = [], 0
    while offset < len(data):
        (length,) = struct.unpack_from("<I", data, offset)
        values.append(data[offset + 4 : offset + 4 + length].decode())
        offset += 4 + length
    return values


def _add_string(response: Any, name: str, value: str) -> None:
    encoded = value.encode()
    response.outputs.add(name=name, datatype="BYTES", shape=[1, 1])
    response.raw_output_contents.append(struct.pack("<I", len(encoded)) + encoded)
