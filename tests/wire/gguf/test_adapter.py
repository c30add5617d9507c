"""Adapters in llama.cpp's form against the PEFT adapters that they were made from, byte by byte as they are stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gguf_files import write_adapter
from support.oracle import Oracle
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config

from multilora_engine.errors import InvalidRequest
from multilora_engine.lora.format import pack_peft
from multilora_engine.lora.sources.directory import DirectorySource
from multilora_engine.lora.sources.packing import pack_directory
from multilora_engine.lora.sources.source import LocalAdapter
from multilora_engine.models.registry import read_model_config
from multilora_engine.serving.sent_adapter import SentFiles
from multilora_wire.adapter_origin import WrongBaseModel
from multilora_wire.gguf.adapter import BaseModel, GGUFAdapter, read_gguf_adapter
from multilora_wire.layout import adapter_layout
from multilora_wire.peft_config import PeftError
from multilora_wire.peft_files import LinearReader, open_peft_directory, read_peft
from multilora_wire.tensor_file import FileBytes, MemoryBytes, TensorFileError

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def config(request: pytest.FixtureRequest) -> PreTrainedConfig:
    return {"llama": LlamaConfig(**SHAPE), "qwen2": Qwen2Config(**SHAPE)}[request.param]


@pytest.fixture(scope="module")
def base(config: PreTrainedConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / config.model_type
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def oracle(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    oracle = Oracle(AutoModelForCausalLM.from_pretrained(base), tmp_path_factory.mktemp("adapters"))
    oracle.add_random("all", 8, ALL, seed=1)
    oracle.add_random(
        "ranks",
        4,
        ["q_proj", "k_proj", "down_proj"],
        seed=2,
        rank_pattern={"k_proj": 7, "layers.1.self_attn.q_proj": 2},
    )
    oracle.add_random("outer", 4, ["embed_tokens", "lm_head", "q_proj"], seed=3)
    return oracle


def stored(adapter: Any, base: Path) -> tuple[Any, ...]:
    packed = pack_peft(adapter, adapter_layout(read_model_config(base).sites, 16, "float32"), base)
    return packed.digest, packed.traits


@pytest.mark.parametrize("name", ["all", "ranks", "outer"])
def test_an_adapter_is_stored_as_the_one_of_peft(
    name: str, base: Path, config: PreTrainedConfig, oracle: Oracle, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "a.gguf", oracle.adapters[name], config)
    sites = read_model_config(base).sites
    with FileBytes(tmp_path / "a.gguf") as source:
        found = stored(read_gguf_adapter(source, base, sites), base)
    with open_peft_directory(oracle.adapters[name], sites) as expected:
        assert found == stored(expected, base)


def test_both_doors_of_the_server_take_it(base: Path, config: PreTrainedConfig, oracle: Oracle, tmp_path: Path) -> None:
    layout = adapter_layout(read_model_config(base).sites, 16, "float32")
    (tmp_path / "a").mkdir()
    write_adapter(tmp_path / "a" / "lora-f32.gguf", oracle.adapters["all"], config)
    with open_peft_directory(oracle.adapters["all"], layout.sites) as peft:
        expected = pack_peft(peft, layout, base).digest
    assert pack_directory(LocalAdapter(tmp_path / "a", tmp_path, "", "a"), layout, base).digest == expected
    data = (tmp_path / "a" / "lora-f32.gguf").read_bytes()
    assert SentFiles(7, layout, b"{}", memoryview(data), base, 1 << 30).pack().digest == expected
    with pytest.raises(InvalidRequest, match=r"is GGUF, which has its own settings: send \{\} as lora_peft_config"):
        SentFiles(7, layout, b'{"r": 8}', memoryview(data), base, 1 << 30).pack()
    with pytest.raises(InvalidRequest, match="the GGUF file: its header goes on to byte"):
        SentFiles(7, layout, b"{}", memoryview(data[:900]), base, 1 << 30).pack()
    assert [key.name for key in DirectorySource(str(tmp_path)).list_keys()] == ["a"]


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16, Type.Q8_0])
def test_values_of_other_types_are_those_of_the_file(
    kind: Type, base: Path, config: PreTrainedConfig, oracle: Oracle, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "a.gguf", oracle.adapters["all"], config, kind)
    sites = read_model_config(base).sites
    with FileBytes(tmp_path / "a.gguf") as source, open_peft_directory(oracle.adapters["all"], sites) as exact:
        ours, error = read_gguf_adapter(source, base, sites), 2**-6 if kind == Type.Q8_0 else 2**-7
        readers = LinearReader(ours, dtype="FP32"), LinearReader(exact, dtype="FP32")
        for one, other in zip(ours.linears, exact.linears, strict=True):
            for found, expected in zip(readers[0].read(one), readers[1].read(other), strict=True):
                assert np.abs(found.values - expected.values).max() <= error * np.abs(expected.values).max()


def test_tokens_that_invoke_an_adapter_and_a_missing_alpha(
    base: Path, config: PreTrainedConfig, oracle: Oracle, tmp_path: Path
) -> None:
    more = {"adapter__alora__invocation_tokens": [5, 6], "adapter__lora__task_name": "x", "adapter__lora__alpha": 0.0}
    write_adapter(tmp_path / "a.gguf", oracle.adapters["ranks"], config, **more)
    sites = read_model_config(base).sites
    with FileBytes(tmp_path / "a.gguf") as source:
        adapter = read_gguf_adapter(source, base, sites)
    assert adapter.config.invocation_tokens == (5, 6)
    assert {(linear.scaling, linear.rank) for linear in adapter.linears} == {(1.0, 7), (1.0, 2), (1.0, 4)}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general__type": "model"}, "general.type is 'model', and 'adapter' is expected"),
        ({"adapter__type": "control_vector"}, "adapter.type is 'control_vector'"),
        ({"general__architecture": "mamba"}, "general.architecture 'mamba' is not supported"),
        ({"general__architecture": "gemma2"}, "general.architecture 'gemma2' is that of gemma2, and the model here is"),
        ({"adapter__lora__nonsense": 1}, "adapter.lora.nonsense 1 is not supported: nobody here knows this key"),
        ({"adapter__lora__alpha": "x"}, "adapter.lora.alpha is 'x', and a number is expected"),
    ],
)
def test_what_nobody_understands_is_refused_by_name(
    base: Path, config: PreTrainedConfig, oracle: Oracle, tmp_path: Path, metadata: dict[str, Any], message: str
) -> None:
    write_adapter(tmp_path / "a.gguf", oracle.adapters["all"], config, **metadata)
    with FileBytes(tmp_path / "a.gguf") as source, pytest.raises(PeftError, match=message):
        GGUFAdapter(source, BaseModel.of(base))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gpt2", "n_embd": 64, "n_head": 4}, "and the model here is gpt2"),
        ({"model_type": "llama"}, "attn_k.weight.lora_b cannot be read: config.json of the base model has no head_dim"),
    ],
)
def test_a_base_model_whose_config_has_other_names_refuses_the_adapter(
    oracle: Oracle, config: PreTrainedConfig, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    if config.model_type != "llama":
        message = "and the model here is"
    write_adapter(tmp_path / "a.gguf", oracle.adapters["all"], config)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with FileBytes(tmp_path / "a.gguf") as source, pytest.raises(PeftError, match=message):
        GGUFAdapter(source, BaseModel.of(tmp_path))


def test_an_adapter_of_another_size_is_refused_with_both_sizes(
    base: Path, config: PreTrainedConfig, oracle: Oracle, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "a.gguf", oracle.adapters["all"], config)
    fields = json.loads((base / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"intermediate_size": 128}))
    with FileBytes(tmp_path / "a.gguf") as source, pytest.raises(WrongBaseModel, match="96"):
        read_gguf_adapter(source, tmp_path, read_model_config(tmp_path).sites)


@pytest.fixture(scope="module")
def file(oracle: Oracle, config: PreTrainedConfig, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("file") / "a.gguf"
    write_adapter(path, oracle.adapters["ranks"], config, Type.F16)
    return path.read_bytes()


@settings(max_examples=150)
@given(st.data())
def test_a_damaged_file_is_refused_or_read_within_itself(
    file: bytes, config: PreTrainedConfig, data: st.DataObject
) -> None:
    damaged = bytearray(file[: data.draw(st.one_of(st.just(len(file)), st.integers(0, len(file))))])
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.integers(0, min(len(file), 2000)))
        changed = data.draw(st.one_of(st.binary(min_size=1, max_size=8), st.just(b"\xff" * 8)))
        damaged[place : place + len(changed)] = changed
    try:
        source = GGUFAdapter(MemoryBytes(bytes(damaged)), BaseModel(config.model_type, 16))
        adapter = read_peft(source.config, source)
        reader = LinearReader(adapter)
        for linear in adapter.linears:
            for _ in reader.read(linear):
                pass
    except (PeftError, WrongBaseModel, TensorFileError):
        pass
