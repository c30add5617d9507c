"""From files to pages: equal to an upload of the same adapter, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adapters import TINY
from support.sources import NO_BASE, digest_of, save_adapter

from multilora_engine.lora.sources.packing import largest_adapter_bytes, pack_directory
from multilora_engine.lora.sources.source import LocalAdapter, Unusable
from multilora_wire.layout import num_values


def pack(folder: Path) -> str:
    return pack_directory(LocalAdapter(folder, folder, revision="1", name="x"), TINY, NO_BASE).digest


def _edit(folder: Path, **config: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def _truncate(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def _claim_4_gib(folder: Path) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [1 << 30], "data_offsets": [0, 4 << 30]}}).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def _claim_a_long_header(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + b"{}")


def _nest(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("[" * 100_000)


def _not_a_number(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    next(iter(tensors.values()))[0, 0] = torch.nan
    save_file(tensors, path)


def _long_layer(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    save_file({k.replace("layers.0", "layers." + "1" * 5000): v for k, v in load_file(path).items()}, path)


def _without_base(folder: Path) -> None:
    """A DoRA adapter, for which NO_BASE is no help."""
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    b_keys = [key for key in tensors if "lora_B" in key]
    magnitudes = {key.replace("lora_B.weight", "lora_magnitude_vector"): tensors[key][:, 0].clone() for key in b_keys}
    save_file(tensors | magnitudes, path)
    _edit(folder, use_dora=True)


def _too_large(folder: Path) -> None:
    save_file({"x": torch.zeros(TINY.largest_piece.num_values + 1)}, folder / "adapter_model.safetensors")


def _too_many(folder: Path) -> None:
    tensors = {f"x{i}": torch.zeros(1) for i in range(3 * TINY.sites.num_columns + 1)}
    save_file(tensors, folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_truncate, "adapter_model.safetensors is not a safetensors file"),
        (_claim_4_gib, r"x has shape \[1073741824\], larger than any matrix"),
        (_claim_a_long_header, "adapter_model.safetensors is not a safetensors file"),
        (_nest, "recursion"),
        (_not_a_number, "NaN"),
        (_long_layer, "layers|digits"),
        (lambda folder: _edit(folder, bias="all"), "adapter_config.json: bias is 'all'; only 'none' is supported"),
        (lambda folder: _edit(folder, use_dora=True), "use_dora is True, but adapter_model.safetensors has no"),
        (_without_base, "self_attn.q_proj|mlp.down_proj|the base model"),
        (_too_large, r"x has shape \[1793\], larger than any matrix"),
        (_too_many, "adapter_model.safetensors has 64 tensors, an adapter of this model has 63 at most"),
        (lambda folder: _edit(folder, r=17, rank_pattern={}), "rank (4|16), but adapter_config.json says 17"),
        (lambda folder: _edit(folder, rank_pattern={"(a+)+$": 4}), r"rank_pattern has the expression '\(a\+\)\+\$'"),
        (lambda folder: _edit(folder, alpha_pattern=["a"]), "alpha_pattern is list, an object is expected"),
        (lambda folder: (folder / "adapter_config.json").write_text("}"), "adapter_config.json is not JSON"),
    ],
)
def test_what_is_damaged_or_unsupported_is_refused_by_name(
    tmp_path: Path, damage: Callable[[Path], object], reason: str
) -> None:
    folder = save_adapter(tmp_path / "x", seed=1)
    damage(folder)
    with pytest.raises(Unusable, match=reason) as caught:
        pack(folder)
    assert str(tmp_path) not in str(caught.value)


def test_a_rank_beyond_the_servers_is_refused(tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "x", seed=1)
    a, b = torch.ones(17, 24), torch.ones(40, 17)
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    save_file({f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}, folder / "adapter_model.safetensors")
    _edit(folder, r=17, rank_pattern={})
    with pytest.raises(Unusable, match=r"Invalid low_rank \(17\). low_rank must be <= max_lora_rank \(16\)"):
        pack(folder)


def test_it_is_the_adapter_that_a_client_would_have_uploaded(tmp_path: Path) -> None:
    assert pack(save_adapter(tmp_path / "x", seed=7)) == digest_of(7)
    halves = save_adapter(tmp_path / "bf16", seed=7)
    path = halves / "adapter_model.safetensors"
    save_file({key: value.bfloat16() for key, value in load_file(path).items()}, path)
    assert pack(halves) != digest_of(7)


def test_no_legal_adapter_is_too_large() -> None:
    values = sum(num_values(module, TINY.max_rank, True) for module in TINY.sites.plain_modules)
    assert largest_adapter_bytes(TINY) > 4 * values
