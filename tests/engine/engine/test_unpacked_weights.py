"""Quantised weights that are also kept as floats: switched under running requests, within the memory there is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.compressed_checkpoints import save_compressed
from support.oracle import Oracle
from support.parity import add_random_adapters, build_engine, requests_for, run_all, tiny_prompts
from transformers import LlamaConfig, LlamaForCausalLM

from multilora_engine.engine import unpacked_weights
from multilora_engine.engine.engine import Engine
from multilora_engine.engine.unpacked_weights import UnpackedWeights
from multilora_engine.errors import InvalidRequest, UnpackedWeightsFull, Unsupported, WeightsBusy

INT4 = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
GROUPS = {"g": {"targets": ["Linear"], "weights": INT4}, "e": {"targets": ["Embedding"], "weights": INT8}}
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
def engine(
    directory: Path, oracle: Oracle, default_model_dir: Path, request: pytest.FixtureRequest
) -> Iterator[Engine]:
    dtype = getattr(request, "param", "float32")
    options = {"max_num_batched_tokens": 40, "max_num_seqs": 14, "dtype": dtype}
    engine = build_engine(directory / "checkpoint", oracle, default_model_dir, **options)
    yield engine
    engine.close()


def unpack(engine: Engine, pattern: str) -> list[str]:
    pending = engine.weights.unpack([pattern])
    while not pending.is_ready():
        pass
    return [name for weight in pending.finish() for name in weight.modules]


def answers_with_switches(engine: Engine, oracle: Oracle, switches: dict[int, str]) -> dict[str, list[int]]:
    """Tokens of a mixed batch. switches: after so many steps the weights of a glob, or none, have floats."""
    answers: dict[str, list[int]] = {}
    for request in requests_for(oracle, tiny_prompts(14), max_tokens=12):
        engine.add_request(request)
        answers[request.request_id] = []
    num_steps = 0
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id] += output.token_ids
        engine.check_integrity()
        num_steps += 1
        if num_steps in switches:
            engine.weights.pack(["*"])
            if switches[num_steps]:
                unpack(engine, switches[num_steps])
    assert num_steps > max(switches, default=0)
    return answers


def test_a_switch_under_running_requests_changes_no_token(engine: Engine, oracle: Oracle) -> None:
    packed = answers_with_switches(engine, oracle, {})
    switches = {3: "*.down_proj", 5: "*", 8: "", 10: "model.layers.1.*"}
    assert answers_with_switches(engine, oracle, switches) == packed


def test_an_unpacked_weight_is_multiplied_as_floats_and_a_packed_one_as_codes(engine: Engine) -> None:
    """At any number of rows: the floats have other numbers here, so that products tell."""
    switch = next(one for one in engine.weights._switches if "model.layers.0.mlp.down_proj" in one.names)
    layer = engine._runner._model.layers[0]  # type: ignore[attr-defined]
    unpack(engine, "model.layers.0.mlp.down_proj")
    assert switch.floats is not None
    for num_rows in (1, 7, 64):
        x = torch.randn(num_rows, switch.codes.shape[1], generator=torch.Generator().manual_seed(num_rows))
        torch.testing.assert_close(layer.mlp.down.forward(x, None), x @ switch.codes.rows(0, 96).T)
    switch.floats.copy_rows(0, torch.zeros(switch.codes.shape))
    for num_rows in (1, 7, 64):
        assert not layer.mlp.down.forward(torch.ones(num_rows, switch.codes.shape[1]), None).any()
    engine.weights.pack(["*"])
    assert layer.mlp.down.forward(torch.ones(1, switch.codes.shape[1]), None).any()


@pytest.mark.parametrize("engine", ["float32", "bfloat16"], indirect=True)
def test_whole_steps_take_up_the_floats_and_drop_them(engine: Engine, oracle: Oracle) -> None:
    """A head of zeros, as floats, has the first token win, which ends an answer here."""
    packed = answers_with_switches(engine, oracle, {})
    assert any(packed.values())
    unpack(engine, "lm_head")
    (head,) = (one for one in engine.weights._switches if one.names == ("lm_head",))
    assert head.floats is not None
    head.floats.copy_rows(0, torch.zeros(head.codes.shape))
    assert not any(answers_with_switches(engine, oracle, {}).values())
    unpack(engine, "*.down_proj")
    assert not any(answers_with_switches(engine, oracle, {}).values())
    engine.weights.pack(["*"])
    assert answers_with_switches(engine, oracle, {}) == packed


@pytest.mark.parametrize("is_unpacked_first", [False, True])
def test_a_prompt_after_a_switch_reuses_nothing_from_before(
    engine: Engine, oracle: Oracle, is_unpacked_first: bool
) -> None:
    requests = requests_for(oracle, [list(range(1, 60))], max_tokens=2)

    def num_hits() -> int:
        before = engine.stats.prefix_cache.hit_tokens
        run_all(engine, requests)
        return engine.stats.prefix_cache.hit_tokens - before

    if is_unpacked_first:
        unpack(engine, "*.down_proj")
    assert num_hits() == 0
    assert num_hits() == 48
    engine.weights.pack(["*.up_proj"])
    assert num_hits() == 48, "nothing was switched"
    if is_unpacked_first:
        engine.weights.pack(["*.down_proj"])
    else:
        unpack(engine, "*.down_proj")
    assert num_hits() == 0
    assert num_hits() == 48


def test_no_weight_is_unpacked_beside_graphs_which_were_captured_with_codes(engine: Engine) -> None:
    weights = UnpackedWeights(engine._runner._model, 1 << 30, torch.device("cpu"), has_graphs=True)
    with pytest.raises(Unsupported, match="the weights stay codes: this server replays its GPU's steps as CUDA graphs"):
        weights.unpack(["*.down_proj"])
    with pytest.raises(InvalidRequest, match="no quantised weight of the model is named"):
        weights.unpack(["model.layers.9.*"])
    assert weights.stats.max_unpacked_bytes == 0
    assert all(weight.unpacked_bytes == 0 for weight in weights.pack(["*"]))
    weights.close()


def test_a_glob_means_the_modules_that_lie_together_and_the_list_tells_of_both_forms(engine: Engine) -> None:
    assert unpack(engine, "model.layers.1.self_attn.k_proj") == [f"model.layers.1.self_attn.{x}_proj" for x in "qkv"]
    listed = {tuple(weight.modules): weight for weight in engine.weights.describe(["*"])}
    unpacked = [weight for weight in listed.values() if weight.unpacked_bytes]
    assert len(unpacked) == 1
    assert unpacked[0].unpacked_bytes == unpacked[0].needed_bytes > 3 * unpacked[0].packed_bytes
    assert engine.stats.weights.unpacked_bytes == unpacked[0].unpacked_bytes
    assert engine.stats.weights.packed_bytes >= sum(weight.packed_bytes for weight in listed.values())
    engine.weights.pack(["*"])
    assert engine.stats.weights.unpacked_bytes == 0


def test_embeddings_are_looked_up_in_their_codes(engine: Engine) -> None:
    """They are no head here."""
    assert ["model.embed_tokens"] not in [weight.modules for weight in engine.weights.describe(["*"])]
    with pytest.raises(InvalidRequest, match="no quantised weight of the model is named"):
        engine.weights.unpack(["model.embed_tokens"])


def test_floats_that_memory_does_not_hold_are_refused_with_the_numbers(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [weight.needed_bytes for weight in engine.weights.describe(["*.down_proj"])]
    engine.weights._max_bytes = sum(sizes) - 1
    with pytest.raises(UnpackedWeightsFull, match=f"3 weights take {sum(sizes)} bytes.* leave {sum(sizes) - 1} more"):
        engine.weights.unpack(["*.down_proj"])
    unpack(engine, "model.layers.0.mlp.down_proj")
    left = sum(sizes) - 1 - sizes[0]
    with pytest.raises(UnpackedWeightsFull, match=f"those of others {sizes[0]}, .* leave {left} more; pack others"):
        engine.weights.unpack(["*.down_proj"])
    monkeypatch.setattr(unpacked_weights, "available_memory", lambda: 7)
    with pytest.raises(UnpackedWeightsFull, match=f"1 weights take {sizes[1]} bytes, .* leave 7 more"):
        engine.weights.unpack(["model.layers.1.mlp.down_proj"])
    assert engine.stats.weights.unpacked_bytes == sizes[0]


def test_while_weights_are_unpacked_no_others_are_switched(engine: Engine) -> None:
    pending = engine.weights.unpack(["lm_head"])
    with pytest.raises(WeightsBusy):
        engine.weights.pack(["*"])
    while not pending.is_ready():
        pass
    pending.finish()
    assert engine.weights.pack(["lm_head"])[0].unpacked_bytes == 0


@pytest.mark.parametrize("name", ["model.layers.9.*", "down_proj", ""])
def test_a_module_that_does_not_exist_is_refused_by_name(engine: Engine, name: str) -> None:
    with pytest.raises(InvalidRequest, match="no quantised weight of the model is named"):
        engine.weights.unpack(["*.down_proj", name])
