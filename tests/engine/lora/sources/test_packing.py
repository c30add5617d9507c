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

from multilora_client import convert_peft
from multilora_engine.lora.sources.packing import largest_adapter_bytes, pack_directory
from multilora_engine.lora.sources.source import LocalAdapter, Unusable, choose_files
from multilora_wire.layout import adapter_layout, num_values
from multilora_wire.sites import attention_shapes, expert_shapes, model_sites

_A_KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def pack(folder: Path) -> str:
    return pack_directory(LocalAdapter(folder, folder, revision="1", name="x"), TINY, NO_BASE).digest


def _edit(folder: Path, **config: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def _truncate(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def _claim_4_gib(folder: Path) -> None:
    tensors = {
        _A_KEY: {"dtype": "F32", "shape": [1 << 30, 24], "data_offsets": [0, 96 << 30]},
        _A_KEY.replace("lora_A", "lora_B"): {"dtype": "F32", "shape": [40, 1], "data_offsets": [96 << 30, 97 << 30]},
    }
    header = json.dumps(tensors).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def _claim_a_long_header(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + b"{}")


def _write_a_long_header(folder: Path) -> None:
    header = json.dumps({"__metadata__": {"notes": ""}}).encode().ljust(5_000_000)
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


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
    rank = 75  # more values than any legal matrix
    tensors = {_A_KEY: torch.zeros(rank, 24), _A_KEY.replace("lora_A", "lora_B"): torch.zeros(40, rank)}
    save_file(tensors, folder / "adapter_model.safetensors")
    _edit(folder, r=rank)


def _uneven(folder: Path) -> None:
    tensors = {_A_KEY: torch.zeros(4, 24), _A_KEY.replace("lora_A", "lora_B"): torch.zeros(40, 75)}
    save_file(tensors, folder / "adapter_model.safetensors")


def _another_model(folder: Path) -> None:
    """q of 40 inputs and 24 outputs has as many values as this model's, of 24 and 40."""
    tensors = {_A_KEY: torch.ones(4, 40), _A_KEY.replace("lora_A", "lora_B"): torch.ones(24, 4)}
    save_file(tensors, folder / "adapter_model.safetensors")
    _edit(folder, base_model_name_or_path="acme/other")


def _wider_model_untrained(folder: Path) -> None:
    tensors = {_A_KEY: torch.ones(4, 48), _A_KEY.replace("lora_A", "lora_B"): torch.zeros(80, 4)}
    save_file(tensors, folder / "adapter_model.safetensors")


def _too_many(folder: Path) -> None:
    tensors = {f"x{i}": torch.zeros(1) for i in range(3 * TINY.sites.num_columns + 1)}
    save_file(tensors, folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_truncate, "adapter_model.safetensors is not a safetensors file"),
        (_claim_4_gib, r"q_proj.lora_B.weight, F32 \[40, 1\], has 1073741824 bytes by its data_offsets"),
        (
            _claim_a_long_header,
            "adapter_model.safetensors .*header has 4611686018427387904 bytes, 294400 at most are read",
        ),
        (_write_a_long_header, "adapter_model.safetensors .*header has 5000000 bytes, 294400 at most are read"),
        (_nest, "nested too deeply"),
        (_not_a_number, "NaN"),
        (_long_layer, "layers|digits"),
        (
            _another_model,
            "made for acme/other, not for base: model.layers.0.self_attn.q_proj has 40 inputs and 24 outputs there, "
            "24 inputs and 40 outputs here",
        ),
        (
            _wider_model_untrained,
            "made for another base model, not for base: .*q_proj has 48 inputs and 80 outputs there",
        ),
        (lambda folder: _edit(folder, kasa_config={"x": 1}), "adapter_config.json: kasa_config is"),
        (lambda folder: _edit(folder, use_dora=True), "use_dora is True, but adapter_model.safetensors has no"),
        (_without_base, "self_attn.q_proj|mlp.down_proj|the base model"),
        (_too_large, r"lora_A.weight: Invalid low_rank \(75\).*; start the server with --set max_lora_rank=75$"),
        (_uneven, r"lora_A.weight \[4, 24\] and .*lora_B.weight \[40, 75\] have different ranks"),
        (_too_many, "adapter_model.safetensors has 64 tensors, an adapter of this model has 63 at most"),
        (lambda folder: _edit(folder, r=17, rank_pattern={}), "rank (4|16), but adapter_config.json says 17"),
        (lambda folder: _edit(folder, rank_pattern={"(a+)+$": 4}), r"rank_pattern has the expression '\(a\+\)\+\$'"),
        (
            lambda folder: _edit(folder, x="x" * 300_000),
            "adapter_config.json has 30.... bytes, at most 262144 are read",
        ),
        (lambda folder: _edit(folder, rank_pattern={f"a{i}": 4 for i in range(200)}), "rank_pattern has 200 entries"),
        (
            lambda folder: _edit(folder, alpha_pattern={"|" * 900 + str(i): 4 for i in range(8)}),
            "alpha_pattern has 7208 characters of patterns, an adapter of this model 2688 at most",
        ),
        (lambda folder: _edit(folder, alpha_pattern=["a"]), r"alpha_pattern is \['a'\], an object is expected"),
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
    with pytest.raises(Unusable, match=r"max_lora_rank \(16\); start the server with --set max_lora_rank=17$"):
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


def test_files_of_a_mixture_are_bounded_by_the_sum_of_what_its_enabled_modules_hold() -> None:
    """Qwen3-30B-A3B: rows as wide as the widest, which is that of 128 experts, would be 33 GiB."""
    sites = model_sites([[*attention_shapes(2048, 4096, 512), *expert_shapes(2048, 768, 128)]] * 48, 2048)
    whole = adapter_layout(sites, 64, "bfloat16")
    values = sum(num_values(module, 64) for module in sites.plain_modules)
    assert 4 * values <= largest_adapter_bytes(whole) <= 4.1 * values
    attention = adapter_layout(sites.restricted_to(["attn_q", "attn_v"]), 64, "bfloat16")
    assert largest_adapter_bytes(attention) < 200 << 20


def converted(folder: Path, *names: str) -> Path:
    """The files that our converter makes of the PEFT adapter in `folder`; only these, if names are given."""
    target = folder.parent / "converted"
    convert_peft(folder).save(target)
    for path in target.iterdir():
        if names and path.name not in names:
            path.unlink()
    return target


@pytest.mark.parametrize("change", [_another_model, _wider_model_untrained])
def test_converted_files_of_another_model_are_refused_by_our_converters_word(
    tmp_path: Path, change: Callable[[Path], object]
) -> None:
    folder = save_adapter(tmp_path / "x", seed=7)
    change(folder)
    with pytest.raises(Unusable, match=r"not for base: .*q_proj has .* there, 24 inputs and 40 outputs here"):
        pack(converted(folder))


def test_converted_files_of_this_model_are_taken_with_and_without_their_origin(tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "x", seed=7)
    assert pack(converted(folder)) == digest_of(7)
    assert pack(converted(folder, "model.lora_weights.npy", "model.lora_config.npy")) == digest_of(7)


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["adapter_config.json", "adapters.safetensors"], "adapters.safetensors: MLX wrote this adapter.*transposed"),
        (["adapter_config.json", "adapter_model.bin"], "adapter_model.bin is a pickle.*safe_serialization=True"),
        (["adapter_0.pt", "adapter_config.json"], "adapter_0.pt is a pickle"),
        (["adapter-f16.gguf", "adapter_config.json"], "adapter-f16.gguf is llama.cpp's form, which is read where"),
        (["adapter-f16.gguf", "adapter-q8.gguf"], "it has 2 GGUF files; leave one of them"),
        (["config.json", "model.safetensors"], "config.json belongs to the checkpoint of a whole model"),
        (
            ["lora.safetensors", "params.json"],
            "lora.safetensors is not in PEFT's form, which is adapter_config.json with",
        ),
    ],
)
def test_other_tools_files_are_named_by_what_they_are(names: list[str], reason: str) -> None:
    with pytest.raises(Unusable, match=reason):
        choose_files(names)


def test_an_origin_alone_is_no_adapter() -> None:
    assert choose_files(["model.lora_weights.npy", "model.lora_keys.npy", "model.lora_origin.json"])[2:] == (
        "model.lora_origin.json",
    )
    with pytest.raises(Unusable, match=r"it has model.lora_origin.json alone"):
        choose_files(["model.lora_origin.json"])


@pytest.mark.parametrize("prefix", ["model.language_model.layers.", "language_model.model.layers."])
def test_an_adapter_of_the_text_part_of_a_model_with_pictures_is_the_text_models(tmp_path: Path, prefix: str) -> None:
    folder = save_adapter(tmp_path / "x", seed=7)
    path = folder / "adapter_model.safetensors"
    save_file({key.replace("model.layers.", prefix, 1): value for key, value in load_file(path).items()}, path)
    assert pack(folder) == digest_of(7)
