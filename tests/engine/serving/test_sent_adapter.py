"""An adapter comes with a request in one of two forms, whole, or not at all; PEFT's files are packed as tensors are."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from support.adapters import TINY, wire_adapter
from support.fake_engine import INFO
from support.fake_triton import FakeRequest
from support.sources import ROWS, digest_of, peft_inputs

from multilora_engine.errors import InvalidRequest
from multilora_engine.serving.inputs import InputTensors
from multilora_engine.serving.sent_adapter import SentFiles, check_adapter_tensors, has_weights, read_adapter
from multilora_engine.text.tokenizer import Tokenizer
from multilora_wire.adapter_use import join_use_files

WIRE = wire_adapter(TINY, ROWS)
TENSORS = {"lora_weights_fp32": WIRE.weights.numpy()[None], "lora_config": WIRE.config.numpy()[None]}
ID = {"lora_task_id": [[7]]}
A_KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture
def files() -> dict[str, Any]:
    """The two inputs of an adapter of PEFT."""
    return peft_inputs(wire_adapter(TINY, ROWS, seed=7))


def pack(tensors: dict[str, Any], info: Any = INFO, tokenizer: Any = None) -> str:
    inputs = InputTensors(FakeRequest(tensors))
    check_adapter_tensors(inputs)
    return read_adapter(inputs, info, tokenizer).pack().digest


def test_files_on_the_use_are_part_of_the_digest_where_they_say_something(
    files: dict[str, Any], tokenizer: Tokenizer
) -> None:
    def digest(tensors: dict[str, Any], **use: str) -> str:
        content = join_use_files({name.replace("_json", ".json"): text for name, text in use.items()})
        return pack(tensors | ID | {"lora_use": np.array([[content]], np.object_)}, INFO, tokenizer)

    assert digest(files, generation_config_json='{"top_k": null}') == digest_of(7)
    first = digest(files, multilora_json='{"system_prompt": "Arr"}')
    assert len({first, digest_of(7), digest(files, multilora_json='{"system_prompt": "Oh"}')}) == 3
    plain = wire_adapter(TINY, ROWS, seed=7)
    tensors = {"lora_weights_fp32": plain.weights.numpy()[None], "lora_config": plain.config.numpy()[None]}
    assert digest(tensors, multilora_json='{"system_prompt": "Arr"}') == first
    with pytest.raises(InvalidRequest, match=r"multilora.json.*prompt"):
        digest(files, multilora_json='{"prompt": "Arr"}')
    with pytest.raises(InvalidRequest, match=r"lora_use: it has other.json"):
        digest(files, other_json="{}")
    with pytest.raises(InvalidRequest, match="lora_use goes with an adapter's weights"):
        check_adapter_tensors(InputTensors(FakeRequest(ID | {"lora_use": np.array([[b"{}"]], np.object_)})))


def test_files_are_the_adapter_that_its_tensors_are(files: dict[str, Any]) -> None:
    inputs = InputTensors(FakeRequest(files | ID))
    check_adapter_tensors(inputs)
    assert has_weights(inputs)
    assert inputs.num_bytes < 1000  # no weights
    sent = read_adapter(inputs, INFO, cast(Any, None))
    assert isinstance(sent, SentFiles)
    assert np.shares_memory(np.asarray(sent.weights), files["lora_peft_weights"])
    assert (sent.lora_task_id, sent.pack().digest) == (7, digest_of(7))


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (lambda files: files | TENSORS | ID, "not as both; the request has lora_weights_fp32 and lora_peft_config"),
        (
            lambda files: files | {"lora_config": TENSORS["lora_config"]} | ID,
            "not as both; the request has lora_config and lora_peft_config",
        ),
        (
            lambda files: {"lora_peft_config": files["lora_peft_config"]} | ID,
            "PEFT's files are lora_peft_config and lora_peft_weights; the request has only lora_peft_config",
        ),
        (
            lambda files: {"lora_peft_weights": files["lora_peft_weights"]} | ID,
            "the request has only lora_peft_weights",
        ),
        (
            lambda files: files,
            "lora_task_id must be set for LoRA inference: the request has lora_peft_weights and no id",
        ),
        (
            lambda files: files | {"lora_peft_weights": files["lora_peft_weights"][0]} | ID,
            r"Invalid shape for lora_peft_weights tensor: \[\d+\]. Expected batch dimension to be 1: \[1, bytes\]",
        ),
        (
            lambda files: files | {"lora_peft_config": np.array([[b"{}", b"{}"]], object)} | ID,
            "lora_peft_config has shape",
        ),
    ],
)
def test_one_form_comes_whole_or_not_at_all(
    files: dict[str, Any], choose: Callable[[dict[str, Any]], dict[str, Any]], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        pack(choose(files))


def config(**fields: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(files: dict[str, Any]) -> dict[str, Any]:
        text = json.dumps(json.loads(files["lora_peft_config"][0, 0]) | fields).encode()
        return files | {"lora_peft_config": np.array([[text]], object)}

    return change


def text(value: bytes) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda files: files | {"lora_peft_config": np.array([[value]], object)}


def weights(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Any], dict[str, Any]]:
    def edit(files: dict[str, Any]) -> dict[str, Any]:
        tensors = change(load(files["lora_peft_weights"].tobytes()))
        return files | {"lora_peft_weights": np.frombuffer(save(tensors), np.uint8)[None]}

    return edit


def bytes_of(change: Callable[[bytes], bytes]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda files: (
        files | {"lora_peft_weights": np.frombuffer(change(files["lora_peft_weights"].tobytes()), np.uint8)[None]}
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (text(b"}"), "adapter_config.json is not JSON"),
        (text(b"[" * 200_000), "adapter_config.json is nested too deeply"),
        (text(b'{"x": "' + b"x" * (2 << 20) + b'"}'), "adapter_config.json has 2097161 bytes, at most 262144 are read"),
        (config(rank_pattern={"(a+)+$": 4}), r"rank_pattern has the expression '\(a\+\)\+\$'"),
        (config(target_modules="(a+)+$", r=3, rank_pattern={}), "has rank 4, but adapter_config.json says 3"),
        (config(invocation_string="<check>"), "invocation_string is '<check>'; .*train it with PEFT"),
        (config(tomorrow=1), "tomorrow is 1, and this field of the configuration is not known"),
        (weights(lambda tensors: tensors | {A_KEY: tensors[A_KEY] * torch.nan}), f"{A_KEY} holds NaN"),
        (
            weights(lambda tensors: tensors | {A_KEY: torch.ones(4, 40)}),
            "made for another base model, not for .*: model.layers.0.self_attn.q_proj has 40 inputs and 40 outputs "
            "there, 24 inputs and 40 outputs here",
        ),
        (bytes_of(lambda data: data[:-1]), r"not a safetensors file: .* ends at byte \d+, and the file has \d+ bytes"),
        (bytes_of(lambda data: b""), "adapter_model.safetensors is not a safetensors file: it has 0 bytes"),
    ],
)
def test_files_that_cannot_be_served_are_refused_with_the_reason(
    files: dict[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        pack(change(files) | ID)


def test_weights_are_as_large_as_they_may_be_and_no_larger(files: dict[str, Any]) -> None:
    num_bytes = files["lora_peft_weights"].nbytes
    assert pack(files | ID, dataclasses.replace(INFO, max_adapter_bytes=num_bytes)) == digest_of(7)
    with pytest.raises(InvalidRequest, match=f"lora_peft_weights has {num_bytes} bytes and lora_max_adapter_bytes is"):
        pack(files | ID, dataclasses.replace(INFO, max_adapter_bytes=num_bytes - 1))


def test_blocks_count_with_the_zeros_between_them(files: dict[str, Any]) -> None:
    """A block-diagonal matrix is larger than its part of the file."""
    key = "base_model.model.model.layers.0.self_attn.q_proj"
    blocks = {"nblocks": 4, "target_modules_bd_a": ["q_proj"]}
    tensors = {f"{key}.lora_A.weight": torch.ones(16, 6), f"{key}.lora_B.weight": torch.ones(40, 16)}
    change = config(r=16, rank_pattern={}, alpha_pattern={}, use_bdlora=blocks)
    sent = weights(lambda _: tensors)(change(files)) | ID
    assert pack(sent, dataclasses.replace(INFO, max_adapter_bytes=4096))
    with pytest.raises(InvalidRequest, match="the matrices of lora_peft_weights have 4096 bytes"):
        pack(sent, dataclasses.replace(INFO, max_adapter_bytes=4000))
