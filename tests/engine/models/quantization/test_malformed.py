"""Mutations of quantised checkpoints: a ConfigError that names the tensor or the key, or the same weights as before."""

from __future__ import annotations

import contextlib
import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.compressed_checkpoints import save_compressed
from support.gptq_awq import awq_tensors, gptq_config, gptq_tensors, in_layers, quantized, save_linears
from support.loaded_weights import LINEARS, dense, load, small_llama

from multilora_client.base_weights import BaseWeights
from multilora_client.errors import AdapterError
from multilora_engine.errors import ConfigError

WEIGHTS = "model.safetensors"
DTYPES = (torch.int32, torch.int64, torch.uint8, torch.int8, torch.float16, torch.float64, torch.float8_e4m3fn)
ODD_VALUES = (
    None,
    True,
    0,
    -1,
    3,
    7,
    2**40,
    1.5,
    "",
    "x",
    "re:(",
    "re:.*",
    "int",
    "float",
    [],
    [1],
    ["re:["],
    {},
    {"a": 1},
)


@dataclass
class Stored:
    """A checkpoint in memory, and the products that its weights give."""

    config: dict[str, Any] = field(repr=False)
    tensors: dict[str, torch.Tensor] = field(repr=False)
    products: list[torch.Tensor] = field(repr=False)
    shapes: dict[str, tuple[int, int]]

    def save(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, path / WEIGHTS)

    def copy(self) -> Stored:
        return Stored(copy.deepcopy(self.config), dict(self.tensors), self.products, self.shapes)


Mutation = Callable[[Stored, Path, random.Random], str | None]
"""Changes a checkpoint and saves it. Returns a part of what a refusal must say; None where other weights are right."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Stored]:
    return [read(make(tmp_path_factory.mktemp("base"))) for make in (packed_integers, gptq, awq, block_fp8)]


def read(path: Path) -> Stored:
    config = json.loads((path / "config.json").read_text())
    attention, hidden, inner = 4 * config["head_dim"], config["hidden_size"], config["intermediate_size"]
    shapes = [(attention, hidden), *[(attention // 2, hidden)] * 2, (hidden, attention), *[(inner, hidden)] * 2]
    linears = dict(zip(LINEARS, [*shapes, (hidden, inner)], strict=True))
    return Stored(config, load_file(path / WEIGHTS), products(path), linears)


def products(path: Path) -> list[torch.Tensor]:
    model = load(path)
    layer = model.layers[0]
    linears = (layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down)
    return [dense(linear.weight) for linear in linears]


def packed_integers(path: Path) -> Path:
    weights = {"num_bits": 3, "type": "int", "symmetric": False, "strategy": "group", "group_size": 8}
    save_compressed(small_llama(), path, {"g": {"targets": ["Linear"], "weights": weights}}, ignore=["lm_head"])
    return path


def block_fp8(path: Path) -> Path:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "block", "block_structure": [16, 8]}
    save_compressed(small_llama(), path, {"g": {"targets": ["Linear"], "weights": weights}}, ignore=["lm_head"])
    return path


def gptq(path: Path) -> Path:
    store = in_layers(lambda name, w: quantized(w, 4, 8, act_order=True, seed=len(name)), gptq_tensors)
    save_linears(path, small_llama(), gptq_config(4, 8, desc_act=True, dynamic={"-:lm_head": {}}), store)
    return path


def awq(path: Path) -> Path:
    config = {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "gemm"}
    save_linears(path, small_llama(head_dim=8), config, in_layers(lambda _, w: quantized(w, 4, 8), awq_tensors))
    return path


def change_config(stored: Stored, path: Path, choose: random.Random) -> str:
    """Replace or remove some value of `quantization_config`."""
    values = stored.config["quantization_config"]
    while True:
        key = choose.choice(sorted(values) if isinstance(values, dict) else range(len(values)))
        if not values[key] or not isinstance(values[key], dict | list) or choose.random() < 0.2:
            break
        values = values[key]
    if choose.random() < 0.2:
        del values[key]
    else:
        values[key] = choose.choice(ODD_VALUES)
    stored.save(path)
    return ""


def remove_tensor(stored: Stored, path: Path, choose: random.Random) -> str:
    name = choose_tensor(stored, choose)
    del stored.tensors[name]
    stored.save(path)
    return module_of(name)


def rename_tensor(stored: Stored, path: Path, choose: random.Random) -> str:
    name = choose_tensor(stored, choose)
    tensor = stored.tensors.pop(name)
    stored.tensors[name[: choose.randrange(len(name))] + choose.choice("x.0_") + name] = tensor
    stored.save(path)
    return module_of(name)


def change_dtype(stored: Stored, path: Path, choose: random.Random) -> str | None:
    name, dtype = choose_tensor(stored, choose), choose.choice(DTYPES)
    stored.tensors[name] = stored.tensors[name].double().to(dtype)
    stored.save(path)
    is_rounded = "scale" in name and dtype == torch.float16
    return None if is_rounded else module_of(name)


def change_shape(stored: Stored, path: Path, choose: random.Random) -> str | None:
    """Cut, lengthen, transpose, or add a dimension."""
    name = choose_tensor(stored, choose)
    tensor = stored.tensors[name]
    dim, size = choose.randrange(tensor.dim()), choose.randrange(1, 4)
    changed = choose.choice(
        [
            tensor.narrow(dim, 0, max(0, tensor.shape[dim] - size)),
            torch.cat([tensor] + [tensor.narrow(dim, 0, 1)] * size, dim),
            tensor.unsqueeze(dim),
            tensor.flatten(),
            tensor.T if tensor.dim() == 2 else tensor[:0],
        ]
    )
    stored.tensors[name] = changed.contiguous()
    stored.save(path)
    return None if changed.shape == tensor.shape else module_of(name)


def change_bits(stored: Stored, path: Path, choose: random.Random) -> None:
    """Other codes, scales, zeros, orders and shapes."""
    name = choose_tensor(stored, choose)
    tensor = stored.tensors[name].clone()
    content = tensor.view(torch.uint8).flatten()
    for _ in range(choose.randrange(1, 5)):
        content[choose.randrange(len(content))] = choose.choice([0, 1, 127, 128, 255])
    stored.tensors[name] = tensor
    stored.save(path)


def change_header(stored: Stored, path: Path, choose: random.Random) -> str:
    """One byte of the header of the file."""
    stored.save(path)
    content = bytearray((path / WEIGHTS).read_bytes())
    length = int.from_bytes(content[:8], "little")
    content[choose.randrange(8 + length)] = choose.choice(b'0189az{}[]",:\xff\x00')
    (path / WEIGHTS).write_bytes(content)
    return ""


def change_length(stored: Stored, path: Path, choose: random.Random) -> str:
    stored.save(path)
    content = (path / WEIGHTS).read_bytes()
    cut = content[: choose.randrange(len(content))]
    (path / WEIGHTS).write_bytes(choose.choice([cut, content + b"\0", content + cut]))
    return WEIGHTS


def choose_tensor(stored: Stored, choose: random.Random) -> str:
    """One of a linear that is stored as codes."""
    names = [name for name in stored.tensors if "_proj." in name]
    return choose.choice(sorted(names))


def module_of(name: str) -> str:
    return name.rpartition(".")[0]


MUTATIONS: list[Mutation] = [
    change_config,
    remove_tensor,
    rename_tensor,
    change_dtype,
    change_shape,
    change_bits,
    change_header,
    change_length,
]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(choose=st.randoms(use_true_random=False))
def test_a_mutated_checkpoint_is_refused_by_name_or_unchanged(
    checkpoints: list[Stored], tmp_path: Path, choose: random.Random
) -> None:
    assert_refused_or_unchanged(checkpoints, tmp_path, choose)


@pytest.mark.long(reason="2,000 checkpoints are written and read")
def test_two_thousand_mutations(checkpoints: list[Stored], tmp_path: Path) -> None:
    for seed in range(2_000):
        assert_refused_or_unchanged(checkpoints, tmp_path, random.Random(seed))


def assert_refused_or_unchanged(checkpoints: list[Stored], path: Path, choose: random.Random) -> None:
    stored = choose.choice(checkpoints).copy()
    named = choose.choice(MUTATIONS)(stored, path / "checkpoint", choose)
    refusal, found = load_products(path / "checkpoint")
    read_for_conversion(path / "checkpoint", stored)
    if found is None:
        assert named is None or named in refusal
    else:
        assert named is None or all(map(torch.equal, found, stored.products))


def load_products(path: Path) -> tuple[str, list[torch.Tensor] | None]:
    """The words of a refusal, or the products of what was loaded."""
    try:
        return "", products(path)
    except ConfigError as error:
        return str(error), None


def read_for_conversion(path: Path, stored: Stored) -> None:
    """The converter reads the checkpoint or refuses it; it does not look at tensors that no adapter needs."""
    with contextlib.suppress(AdapterError):
        base = BaseWeights(path)
        for linear in LINEARS:
            for _ in base.tiles(f"model.layers.0.{linear}", stored.shapes[linear]):
                pass
