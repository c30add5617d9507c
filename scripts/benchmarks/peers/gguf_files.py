"""GGUF files for llama.cpp: the floats of another GGUF file, and PEFT's adapters."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

from multilora_wire.gguf.names import ARCHITECTURES, row_order

_TYPES = {"float32": gguf.GGMLQuantizationType.F32, "bfloat16": gguf.GGMLQuantizationType.BF16}
_PREFIX = "base_model.model.model.layers."


def write_floats(source: Path, target: Path, dtype: str) -> None:
    """Write the model of the GGUF file `source` with all matrices in `dtype`, float32 or bfloat16."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, _text(reader, "general.architecture"))
    for field in reader.fields.values():
        if field.name != "general.architecture" and not field.name.startswith("GGUF."):
            items = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], items)
    for tensor in reader.tensors:
        kind = _TYPES[dtype] if len(tensor.shape) > 1 else gguf.GGMLQuantizationType.F32
        floats = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, gguf.quantize(floats, kind), raw_dtype=kind)
    _finish(writer)


def write_adapter(directory: Path, target: Path, model: Path) -> None:
    """Write the PEFT adapter in `directory`, on linears of layers, as llama.cpp reads it for the GGUF file `model`."""
    reader = gguf.GGUFReader(model)
    architecture = _text(reader, "general.architecture")
    names = ARCHITECTURES[architecture]
    heads = [_number(reader, f"{architecture}.attention.{key}") for key in ("head_count", "head_count_kv")]
    stored_as = {module: name for name, module in names.modules.items()}
    writer = gguf.GGUFWriter(target, architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    alpha = json.loads((directory / "adapter_config.json").read_text())["lora_alpha"]
    writer.add_float32("adapter.lora.alpha", float(alpha))
    for key, values in load_file(directory / "adapter_model.safetensors").items():
        layer, _, rest = key.removeprefix(_PREFIX).partition(".")
        module, _, side = rest.removesuffix(".weight").rpartition(".")
        if side == "lora_B" and (num_heads := names.heads_of_rows(f".{module}.", *heads)):
            values = values[np.argsort(row_order(len(values), num_heads))]
        name = f"blk.{layer}.{stored_as[module]}.weight.{side.lower()}"
        writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    _finish(writer)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _text(reader: gguf.GGUFReader, key: str) -> str:
    field = reader.get_field(key)
    assert field is not None, key
    return str(field.contents())


def _number(reader: gguf.GGUFReader, key: str) -> int:
    field = reader.get_field(key)
    assert field is not None, key
    return int(field.contents())
