"""The files that llama.cpp is compared with hold the same numbers as the checkpoint and the adapters."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from support import gguf_files as converter
from transformers import AutoModelForCausalLM

from benchmarks.bench_engine import save_tiny_model
from benchmarks.peers.gguf_files import write_adapter, write_floats
from benchmarks.peft_baseline import PeftBaseline


def tensors(file: Path) -> dict[str, np.ndarray]:
    return {each.name: gguf.dequantize(each.data, each.tensor_type) for each in gguf.GGUFReader(file).tensors}


def metadata(file: Path) -> dict[str, object]:
    fields = gguf.GGUFReader(file).fields.values()
    return {field.name: field.contents() for field in fields if not field.name.startswith("GGUF.")}


def test_an_adapter_is_what_llama_cpps_converter_writes(tmp_path: Path) -> None:
    checkpoint = save_tiny_model(tmp_path / "tiny")
    (adapter,) = PeftBaseline(checkpoint, 1, 4).save(tmp_path / "adapters")
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    converter.write_model(tmp_path / "model.gguf", model)
    write_adapter(adapter, tmp_path / "ours.gguf", tmp_path / "model.gguf")
    converter.write_adapter(tmp_path / "theirs.gguf", adapter, model.config)
    ours, theirs = tensors(tmp_path / "ours.gguf"), tensors(tmp_path / "theirs.gguf")
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        np.testing.assert_array_equal(values, theirs[name], name)
    assert metadata(tmp_path / "ours.gguf") == metadata(tmp_path / "theirs.gguf")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_floats_are_those_of_the_codes(tmp_path: Path, dtype: str) -> None:
    source, target = tmp_path / "codes.gguf", tmp_path / "floats.gguf"
    model = AutoModelForCausalLM.from_pretrained(save_tiny_model(tmp_path / "tiny"))
    converter.write_model(source, model, lambda _: gguf.GGMLQuantizationType.Q4_1)
    write_floats(source, target, dtype)
    codes, floats = tensors(source), tensors(target)
    assert codes.keys() == floats.keys()
    for name, values in codes.items():
        np.testing.assert_allclose(floats[name], values, rtol=0 if dtype == "float32" else 2**-8, err_msg=name)
    assert metadata(source) == metadata(target)
