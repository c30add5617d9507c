"""Models with an encoder against transformers and PEFT: logits over a paged cache, step by step."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from support.compressed_checkpoints import save_compressed
from support.encoder_decoders import (
    MODELS,
    Adapters,
    Decoding,
    SourceRunner,
    make_model,
    random_tokens,
    reference_logits,
    run_alone,
)

from multilora_engine.errors import ConfigError
from multilora_engine.models.loader import load_model
from multilora_engine.models.model import only_group
from multilora_engine.models.weights import Placement
from multilora_kernels import cpu
from multilora_wire.sites import ModelSites

ATOL = 1e-4
"""Of logits up to 30."""

_IS_LONG = pytest.mark.long(reason="5 s each; another member of the family is in the default run")

CHUNKS = [(7, [1, 1, 1, 1, 1]), (1, [4, 1, 1]), (30, [3, 9, 1, 15, 1]), (19, [1] * 24), (7, [2, 1])]
"""Of five sequences the source's length and the tokens of each step; the first step has all of them."""


@pytest.mark.parametrize("name", MODELS)
def test_logits_match_transformers_for_sources_beginnings_and_decode_in_one_batch(name: str, tmp_path: Path) -> None:
    reference = make_model(name)
    reference.save_pretrained(tmp_path, max_shard_size="20kB")
    decodings = decodings_of(CHUNKS)
    logits = run(SourceRunner(load_model(tmp_path, placement(torch.float32))), decodings, CHUNKS)
    for decoding, rows in zip(decodings, logits, strict=True):
        torch.testing.assert_close(rows, reference_logits(reference, decoding), atol=ATOL, rtol=1e-4)


@pytest.mark.parametrize("name", ["t5", "mt5", "mbart"])
def test_plain_pytorch_computes_where_no_operator_is_compiled(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_library", functools.cache(lambda: None))
    test_logits_match_transformers_for_sources_beginnings_and_decode_in_one_batch(name, tmp_path)


@pytest.mark.parametrize(
    "name", ["t5 v1.1", "bart", *(pytest.param(name, marks=_IS_LONG) for name in ("t5", "mt5", "mbart"))]
)
def test_each_linear_of_both_stacks_takes_the_adapter_of_its_own_row(name: str, tmp_path: Path) -> None:
    """One adapter for each linear of each stack, which changes that linear alone; adapters of many; and base rows."""
    reference = make_model(name)
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path, placement(torch.float32))
    adapters = Adapters.random(
        reference, {**one_adapter_a_linear(model.adapter_sites), **MIXED["bart" if "bart" in name else "t5"]}
    )
    rows = [-1, *range(len(adapters.names)), -1]
    chunks = [(3 + 5 * (i % 4), [1 + 3 * (i % 2), 1, 1]) for i in range(len(rows))]
    decodings = decodings_of(chunks, rows)
    tables = adapters.tables(model.adapter_sites)
    logits = run(SourceRunner(model, tables, num_blocks=400), decodings, chunks)
    for decoding, found in zip(decodings, logits, strict=True):
        with adapters.only(decoding.adapter) as oracle:
            expected = reference_logits(oracle, decoding)
        label = adapters.names[decoding.adapter] if decoding.adapter >= 0 else "base"
        torch.testing.assert_close(found, expected, atol=ATOL, rtol=1e-4, msg=lambda text, of=label: f"{of}: {text}")
        with adapters.only(-1) as oracle:
            change = (reference_logits(oracle, decoding) - found).abs().max()
        assert change > 50 * ATOL or decoding.adapter < 0, f"{label} changes nothing"
    alone = [
        run(SourceRunner(model, tables, seed=1), decodings_of([c], [d.adapter], [d.source_ids], [d.token_ids]), [c])[0]
        for c, d in zip(chunks, decodings, strict=True)
    ]
    for one, among in zip(alone, logits, strict=True):
        assert one.equal(among)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("name", ["t5", "mbart"])
def test_bits_in_bfloat16_are_the_same_alone_as_in_any_batch(
    name: str, cache_dtype: torch.dtype, tmp_path: Path
) -> None:
    """Also over a cache of codes, which are near to the floats."""
    make_model(name).save_pretrained(tmp_path)
    model = load_model(tmp_path, placement(torch.bfloat16))
    chunks = [(1 + 7 * i, [1 + i % 4, 1, 1, 2]) for i in range(8)]
    found, exact = (run(SourceRunner(model, dtype=kind), decodings_of(chunks), chunks) for kind in (cache_dtype, None))
    for i, (decoding, logits, near) in enumerate(zip(decodings_of(chunks), found, exact, strict=True)):
        (alone,) = run(SourceRunner(model, dtype=cache_dtype, seed=3), [decoding], [chunks[i]])
        assert alone.equal(logits)
        assert (logits - near).square().mean() < 0.01 * near.square().mean()


@pytest.mark.parametrize(
    ("name", "dtype"), [("t5 v1.1", torch.bfloat16), ("bart", torch.bfloat16), ("bart", torch.float16)]
)
def test_half_precision_is_as_near_to_float32_as_transformers_is(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    reference = make_model(name)
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path, placement(dtype))
    chunks = [(9 + i, [4, 1, 1]) for i in range(8)]
    decodings = decodings_of(chunks)
    found = torch.cat(run(SourceRunner(model), decodings, chunks))
    exact = torch.cat([reference_logits(reference, decoding) for decoding in decodings])
    reference.to(dtype)
    half = torch.cat([reference_logits(reference, decoding) for decoding in decodings])
    assert (found - exact).square().mean() < 2 * (half.float() - exact).square().mean()


@pytest.mark.parametrize("name", ["t5", "t5 v1.1"])
def test_t5_is_refused_in_float16_which_its_numbers_overflow(name: str, tmp_path: Path) -> None:
    make_model(name).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"dtype=float16: .* write bfloat16 or float32"):
        load_model(tmp_path, placement(torch.float16))


@pytest.mark.parametrize("name", ["t5", "mbart"])
def test_quantised_checkpoints_multiply_by_their_codes(name: str, tmp_path: Path) -> None:
    """The quantised file also has the embeddings three times, as equal tensors."""
    reference = make_model(name)
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    save_compressed(reference, tmp_path, groups, ignore=["lm_head"])
    model = load_model(tmp_path, placement(torch.float32))
    (decoding,) = decodings_of([(9, [5])])
    found = run_alone(model, decoding)
    torch.testing.assert_close(found, reference_logits(reference, decoding), atol=ATOL, rtol=1e-4)
    num_codes = sum(site.in_size * site.out_size for site in model.adapter_sites.sites)
    assert sum(count for kind, count in model.weight_bytes.items() if kind != "float32") >= num_codes


def test_memory_of_weights_is_that_of_both_stacks(tmp_path: Path) -> None:
    reference = make_model("bart")
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path, placement(torch.float32))
    matrices = {id(p): p.nbytes for p in reference.parameters() if p.dim() == 2 and p.shape[0] != 66}
    assert sum(model.weight_bytes.values()) >= sum(matrices.values())
    assert only_group(model.kv_groups).num_layers == model.config.num_layers == 3


MIXED = {
    "t5": {
        "PEFT's defaults": LoraConfig(r=3, target_modules=["q", "v"]),
        "all, DoRA": LoraConfig(r=5, target_modules=["q", "k", "v", "o", "wi", "wi_0", "wi_1", "wo"], use_dora=True),
        "rsLoRA": LoraConfig(r=8, lora_alpha=3, target_modules=["k", "o", "wo"], use_rslora=True),
    },
    "bart": {
        "PEFT's defaults": LoraConfig(r=3, target_modules=["q_proj", "v_proj"]),
        "all, DoRA": LoraConfig(r=5, target_modules="all-linear", exclude_modules=["lm_head"], use_dora=True),
        "rsLoRA": LoraConfig(r=8, lora_alpha=3, target_modules=["k_proj", "out_proj", "fc2"], use_rslora=True),
    },
}


def one_adapter_a_linear(sites: ModelSites) -> dict[str, LoraConfig]:
    linears = dict.fromkeys(re.sub(r"\d+(?=\.)", "N", sites.full_name(site.name), count=1) for site in sites.sites)
    return {
        name.replace(".", " "): LoraConfig(r=2, target_modules=re.escape(name).replace("N", r"\d+")) for name in linears
    }


def decodings_of(
    chunks: Sequence[tuple[int, list[int]]],
    adapters: Sequence[int] | None = None,
    source_ids: Sequence[list[int]] | None = None,
    token_ids: Sequence[list[int]] | None = None,
) -> list[Decoding]:
    """Of random tokens where none are given."""
    return [
        Decoding(
            random_tokens(length, i) if source_ids is None else source_ids[i],
            random_tokens(sum(lens), 100 + i) if token_ids is None else token_ids[i],
            -1 if adapters is None else adapters[i],
        )
        for i, (length, lens) in enumerate(chunks)
    ]


def run(runner: SourceRunner, decodings: list[Decoding], chunks: Sequence[tuple[int, list[int]]]) -> list[torch.Tensor]:
    """The logits of all tokens of each sequence, fed in chunks."""
    logits: list[list[torch.Tensor]] = [[] for _ in decodings]
    for step in range(max(len(lens) for _, lens in chunks)):
        work = [(i, lens[step]) for i, (_, lens) in enumerate(chunks) if step < len(lens)]
        for (i, _), rows in zip(work, runner.step([(decodings[i], n) for i, n in work]), strict=True):
            logits[i].append(rows)
    return [torch.cat(rows) for rows in logits]


def placement(dtype: torch.dtype) -> Placement:
    return Placement(dtype, dtype, torch.device("cpu"))
