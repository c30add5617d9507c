"""Quantised weights that are also kept as floats: switched under running requests, within a budget."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from itertools import groupby, product
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from support.compressed_checkpoints import save_compressed
from support.oracle import Oracle
from support.parity import add_random_adapters, build_engine, requests_for, tiny_prompts
from transformers import LlamaConfig, LlamaForCausalLM

from multilora_engine.engine import unpacked_weights
from multilora_engine.engine.engine import Engine
from multilora_engine.engine.unpacked_weights import ProductTimes
from multilora_engine.engine.weight_info import PathChoice
from multilora_engine.errors import ConfigError, InvalidRequest, UnpackedWeightsFull, WeightsBusy
from multilora_engine.models.weights import MEASURED_ROWS
from multilora_kernels import PackedWeight
from multilora_kernels.linear import packed_linear
from multilora_kernels.quantized import QuantizedWeight

INT4 = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
GROUPS = {"g": {"targets": ["Linear"], "weights": INT4}, "e": {"targets": ["Embedding"], "weights": INT8}}
BUDGET = 1 << 21
TINY = LlamaConfig(
    vocab_size=311,
    hidden_size=96,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.3,
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantised")


@pytest.fixture(scope="module")
def oracle(directory: Path) -> Oracle:
    torch.manual_seed(7)
    model = LlamaForCausalLM(TINY)
    save_compressed(model, directory / "checkpoint", GROUPS)
    oracle = Oracle(model, directory)
    add_random_adapters(oracle)
    return oracle


@pytest.fixture
def engine(directory: Path, oracle: Oracle, default_model_dir: Path) -> Iterator[Engine]:
    engine = serve(directory, oracle, default_model_dir, BUDGET)
    yield engine
    engine.close()


def serve(
    directory: Path, oracle: Oracle, tokenizer: Path, budget: int, unpacked: str = "", dtype: str = "float32"
) -> Engine:
    return build_engine(
        directory / "checkpoint",
        oracle,
        tokenizer,
        dtype=dtype,
        max_num_batched_tokens=40,
        max_num_seqs=14,
        enable_prefix_caching=False,
        unpacked_weights_memory_bytes=budget,
        unpacked_weights=unpacked,
    )


def unpack(engine: Engine, pattern: str, choice: PathChoice = "unpacked") -> list[str]:
    pending = engine.weights.unpack([pattern], choice)
    while not pending.is_ready():
        pass
    return [name for weight in pending.finish() for name in weight.modules]


def answers_with_switches(engine: Engine, oracle: Oracle, switches: dict[int, str]) -> dict[str, list[object]]:
    """Tokens and logits of a mixed batch. switches: after so many steps the weights of a glob, or none, floats."""
    answers: dict[str, list[object]] = {}
    for request in requests_for(oracle, tiny_prompts(14), max_tokens=12):
        sampling = replace(request.sampling, return_generation_logits=True)
        engine.add_request(replace(request, sampling=sampling))
        answers[request.request_id] = []
    num_steps = 0
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id] += [*output.token_ids, output.generation_logits]
        num_steps += 1
        if num_steps in switches:
            engine.weights.pack(["*"])
            if switches[num_steps]:
                unpack(engine, switches[num_steps])
    assert num_steps > max(switches, default=0)
    return answers


def test_a_switch_under_running_requests_changes_no_token_and_no_bit(engine: Engine, oracle: Oracle) -> None:
    packed = answers_with_switches(engine, oracle, {})
    switches = {3: "*.down_proj", 5: "*", 8: "", 10: "model.layers.1.*"}
    assert answers_with_switches(engine, oracle, switches) == packed


def test_in_bfloat16_no_activation_is_rounded_for_codes_that_may_be_unpacked(
    directory: Path, oracle: Oracle, default_model_dir: Path
) -> None:
    engine = serve(directory, oracle, default_model_dir, BUDGET, dtype="bfloat16")
    assert answers_with_switches(engine, oracle, {3: "*", 8: ""}) == answers_with_switches(engine, oracle, {})
    engine.close()


def test_a_glob_means_the_modules_that_lie_together_and_the_list_tells_of_both_forms(engine: Engine) -> None:
    assert unpack(engine, "model.layers.1.self_attn.k_proj") == [f"model.layers.1.self_attn.{x}_proj" for x in "qkv"]
    listed = {tuple(weight.modules): weight for weight in engine.weights.describe(["*"])}
    unpacked = [weight for weight in listed.values() if weight.unpacked_bytes]
    assert len(unpacked) == 1
    assert unpacked[0].unpacked_rows == list(MEASURED_ROWS)
    assert unpacked[0].unpacked_bytes == unpacked[0].needed_bytes > 3 * unpacked[0].packed_bytes
    assert engine.stats.weights.unpacked_bytes == unpacked[0].unpacked_bytes
    assert engine.stats.weights.packed_bytes >= sum(weight.packed_bytes for weight in listed.values())
    engine.weights.pack(["*"])
    assert engine.stats.weights.unpacked_bytes == 0


def test_auto_takes_the_floats_at_measured_row_counts_only(engine: Engine) -> None:
    unpack(engine, "*", "auto")
    for weight in engine.weights.describe(["*"]):
        assert set(weight.unpacked_rows) <= set(MEASURED_ROWS)
        assert weight.unpacked_bytes


def test_auto_takes_codes_where_they_are_clearly_faster() -> None:
    times = zip(*((1.0, 2.0), (1.0, 1.2), (1.0, 1.05), (1.0, 1.0), (2.0, 1.0)), strict=True)
    codes, floats = times
    assert ProductTimes(torch.Size((3, 5)), "int4", codes, floats).float_classes == {2, 3, 4}


def test_what_auto_goes_by_is_logged_at_the_start_and_read_by_whoever_asks(
    directory: Path, oracle: Oracle, default_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine = serve(directory, oracle, default_model_dir, BUDGET, "*")
    compared = {one.shape: one for one in engine.weights.comparisons}
    assert compared.keys() == {torch.Size(shape) for shape in ((160, 96), (96, 96), (320, 96), (96, 160), (311, 96))}
    for weight in engine.weights.describe(["*.q_proj"]):
        one = compared[torch.Size((160, 96))]
        assert weight.unpacked_rows == [MEASURED_ROWS[row_class] for row_class in sorted(one.float_classes)]
        assert len(one.codes) == len(one.floats) == len(MEASURED_ROWS)
        assert min(*one.codes, *one.floats) > 0
    for one in compared.values():
        assert f"{one.shape[0]} x {one.shape[1]}, {one.kind}: " in caplog.text
    engine.close()


def test_floats_that_a_start_made_are_timed_where_they_lie(
    directory: Path, oracle: Oracle, default_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[PackedWeight] = []
    timed: list[PackedWeight] = []
    unpacked = QuantizedWeight.unpacked

    def noted(weight: QuantizedWeight) -> PackedWeight:
        made.append(unpacked(weight))
        return made[-1]

    def multiplied(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        timed.append(weight)
        return packed_linear(x, weight)

    monkeypatch.setattr(QuantizedWeight, "unpacked", noted)
    monkeypatch.setattr(unpacked_weights, "packed_linear", multiplied)
    monkeypatch.setattr(unpacked_weights, "_TIMED_BYTES", 1)
    serve(directory, oracle, default_model_dir, BUDGET, "model.layers.1.*").close()
    *of_the_layer, head = made
    assert len(of_the_layer) == 4
    assert {id(weight) for weight in timed} == {id(weight) for weight in (*of_the_layer, head)}
    assert head.shape == (TINY.vocab_size, TINY.hidden_size), "only what has no floats is unpacked to be timed"


def test_before_products_are_timed_a_step_s_other_weights_have_driven_theirs_out_of_the_caches(
    directory: Path, oracle: Oracle, default_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of cached weights floats are as fast as codes, of which a step reads a fourth or an eighth of the bytes."""
    events: list[tuple[str, int, object]] = []

    def note_products(name: str) -> None:
        multiply = getattr(unpacked_weights, name)

        def noted(x: torch.Tensor, weight: object) -> torch.Tensor:
            events.append((name, len(x), weight))
            return multiply(x, weight)  # type: ignore[no-any-return]

        monkeypatch.setattr(unpacked_weights, name, noted)

    note_products("quantized_linear")
    note_products("packed_linear")
    monkeypatch.setattr(QuantizedWeight, "read", lambda weight: events.append(("read", 0, weight)))

    serve(directory, oracle, default_model_dir, BUDGET).close()

    stretches = [(key, [weight for *_, weight in run]) for key, run in groupby(events, lambda event: event[:2])]
    assert all(kind == "read" for (kind, _), _ in stretches[0::2])
    times = Counter(key for key, _ in stretches[1::2])
    assert times.keys() == set(product(("quantized_linear", "packed_linear"), MEASURED_ROWS))
    assert len({*times.values()}) == 1
    num_weights = 3 * 4 + 1
    for (_, read), ((name, _), timed) in zip(stretches[0::2], stretches[1::2], strict=True):
        assert len(read) + len(timed) == num_weights
        assert len({*read, *timed}) == num_weights, f"{name} of weights that were read before it"


def test_embeddings_are_looked_up_in_their_codes_and_take_no_budget(engine: Engine) -> None:
    """They are no head here."""
    assert ["model.embed_tokens"] not in [weight.modules for weight in engine.weights.describe(["*"])]
    with pytest.raises(InvalidRequest, match="no quantised weight of the model is named"):
        engine.weights.unpack(["model.embed_tokens"], "auto")


def test_an_unpack_beyond_the_budget_is_refused_with_the_numbers(
    directory: Path, oracle: Oracle, default_model_dir: Path
) -> None:
    engine = serve(directory, oracle, default_model_dir, 0)
    needed = sum(weight.needed_bytes for weight in engine.weights.describe(["*.down_proj"]))
    with pytest.raises(InvalidRequest, match=f"3 weights take {needed} bytes, .* is 0; unpack fewer, or start"):
        engine.weights.unpack(["*.down_proj"], "auto")
    assert engine.stats.weights.unpacked_bytes == 0
    engine.close()
    engine = serve(directory, oracle, default_model_dir, needed, "*.down_proj")
    with pytest.raises(UnpackedWeightsFull, match=f"those of others {needed}, .* is {needed}; pack others first"):
        engine.weights.unpack(["*.layers.0.mlp.gate_proj"], "auto")
    engine.close()


def test_weights_unpacked_at_the_start_give_the_bits_of_their_codes(
    directory: Path, oracle: Oracle, default_model_dir: Path, engine: Engine
) -> None:
    """Budget for these floats and for no more; packed and unpacked again they stay within it."""
    needed = sum(weight.needed_bytes for weight in engine.weights.describe(["*.down_proj", "lm_head"]))
    started = serve(directory, oracle, default_model_dir, needed, "*.down_proj, lm_head")
    unpacked = {name for weight in started.weights.describe(["*"]) if weight.unpacked_bytes for name in weight.modules}
    assert unpacked == {"lm_head", *(f"model.layers.{layer}.mlp.down_proj" for layer in range(3))}
    assert started.stats.weights.unpacked_bytes == needed
    everywhere = unpack(started, "*.down_proj") + unpack(started, "lm_head")
    assert set(everywhere) == unpacked
    assert answers_with_switches(started, oracle, {6: "lm_head"}) == answers_with_switches(engine, oracle, {})
    started.close()


@pytest.mark.parametrize(
    ("budget", "names", "message"),
    [
        (1000, "*.down_proj", r"unpacked_weights: its floats take (\d+) bytes, and .*_bytes is 1000; write \1 there"),
        (BUDGET, "*.down_proj,down_proj", "unpacked_weights: no quantised weight of the model is named 'down_proj'"),
    ],
)
def test_weights_that_cannot_be_unpacked_at_the_start_stop_the_load(
    directory: Path, oracle: Oracle, default_model_dir: Path, budget: int, names: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        serve(directory, oracle, default_model_dir, budget, names)


def test_while_weights_are_unpacked_no_others_are_switched(engine: Engine) -> None:
    pending = engine.weights.unpack(["lm_head"], "auto")
    with pytest.raises(WeightsBusy):
        engine.weights.pack(["*"])
    while not pending.is_ready():
        pass
    pending.finish()
    assert engine.weights.pack(["lm_head"])[0].unpacked_bytes == 0


@pytest.mark.parametrize("name", ["model.layers.9.*", "down_proj", ""])
def test_a_module_that_does_not_exist_is_refused_by_name(engine: Engine, name: str) -> None:
    with pytest.raises(InvalidRequest, match="no quantised weight of the model is named"):
        engine.weights.unpack(["*.down_proj", name], "auto")
