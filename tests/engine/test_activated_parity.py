"""Activated adapters against PEFT: the base computes the tokens before the invocation, in whatever way they come."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora.variants import calculate_alora_offsets
from support.engines import Answer, assert_idle, poison_claimed_blocks, run_all
from support.oracle import ATTENTION, MLP, Oracle
from support.parity import TINY, TINY_KV_CACHE_BYTES
from support.sources import NO_BASE
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from multilora_engine.config import EngineConfig
from multilora_engine.engine.engine import Engine
from multilora_engine.errors import InvalidRequest
from multilora_engine.lora.format import content_digest, pack_peft
from multilora_engine.lora.layout import PackedAdapter
from multilora_engine.lora.names import task_id_of
from multilora_engine.lora_config import LoRAConfig, SourceSpec
from multilora_engine.request import GenerationRequest, SamplingParams, Sender
from multilora_engine.sequences.prompt_log_probs import row_type
from multilora_wire.layout import AdapterLayout
from multilora_wire.peft_files import open_peft_directory

INVOCATIONS = {"judge": (7, 9), "guard": (7, 9), "extractor": (300,)}
JUDGE, GUARD, EXTRACTOR, PLAIN, POSITION = range(5)
"""Task ids. POSITION: the judge's matrices without its invocation tokens, which starts where requests say."""

BLOCK_SIZE = 8
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return with_adapters(LlamaForCausalLM, LlamaConfig(**TINY), tmp_path_factory.mktemp("llama"))


def with_adapters(model_class: Any, config: Any, directory: Path) -> Oracle:
    torch.manual_seed(7)
    model = model_class(config)
    model.save_pretrained(directory / "checkpoint")
    oracle = Oracle(model, directory)
    for seed, (name, modules) in enumerate(
        {"judge": ATTENTION + MLP, "guard": ATTENTION, "extractor": ["k_proj", "v_proj", "down_proj"]}.items()
    ):
        tokens = list(INVOCATIONS[name])
        oracle.add_random(name, 4 + 3 * seed, modules, seed + 1, alora_invocation_tokens=tokens, task_type="CAUSAL_LM")
    oracle.add_random("plain", 8, ATTENTION + MLP, seed=5)
    return oracle


def packed(oracle: Oracle, name: str, layout: AdapterLayout) -> PackedAdapter:
    """An adapter of PEFT's files."""
    with open_peft_directory(oracle.adapters[name], layout.sites, "") as adapter:
        return pack_peft(adapter, layout, NO_BASE)


def without_traits(packed: PackedAdapter, layout: AdapterLayout) -> PackedAdapter:
    """The same matrices, without invocation tokens."""
    return PackedAdapter(content_digest(packed.rows, packed.pages, layout.lora_dtype), packed.rows, packed.pages)


def make_engine(oracle: Oracle, tokenizer: Path, num_blocks: int | None = None, **options: Any) -> Engine:
    """num_blocks: of the KV cache, roughly."""
    checkpoint = next(iter(oracle.adapters.values())).parent / "checkpoint"
    bytes_per_block = BLOCK_SIZE * 2 * 3 * 2 * 12 * 4
    num_bytes = TINY_KV_CACHE_BYTES if num_blocks is None else num_blocks * bytes_per_block
    config = EngineConfig(
        model_path=checkpoint,
        tokenizer_path=tokenizer,
        **{
            "num_threads": 1,
            "block_size": BLOCK_SIZE,
            "kv_cache_memory_bytes": num_bytes,
            "lora": LoRAConfig(lora_cache_host_memory_bytes=64 << 20),
            "inter_token_latency_target_ms": 0.0,
            **options,
        },
    )
    engine = Engine(config)
    layout = engine.info.adapter_layout
    for task_id, name in enumerate([*INVOCATIONS, "plain"]):
        engine.put_adapter(task_id, packed(oracle, name, layout))
    engine.put_adapter(POSITION, without_traits(packed(oracle, "judge", layout), layout))
    return engine


NAMES = (*INVOCATIONS, "plain", "judge")


def request(
    name: str,
    prompt: list[int],
    task: int | None = None,
    start: int | None = None,
    tenant: str = "",
    **sampling: Any,
) -> GenerationRequest:
    parameters = SamplingParams(**{"max_tokens": 8, "end_id": -1, **sampling})
    return GenerationRequest(name, prompt, parameters, task, sender=Sender(tenant=tenant), lora_start=start)


def start_of(one: GenerationRequest) -> int | None:
    """Where PEFT lets the adapter of a request begin; None: no activated adapter."""
    if one.lora_start is not None or one.lora_task_id in (None, PLAIN, POSITION):
        return one.lora_start
    assert one.lora_task_id is not None
    tokens = list(INVOCATIONS[NAMES[one.lora_task_id]])
    config = LoraConfig(alora_invocation_tokens=tokens, task_type="CAUSAL_LM")
    (offset,) = calculate_alora_offsets({"x": config}, "x", torch.tensor([one.prompt_token_ids]))
    return len(one.prompt_token_ids) - offset


def expected_logits(oracle: Oracle, one: GenerationRequest, prompt: list[int], answer: list[int]) -> torch.Tensor:
    name = None if one.lora_task_id is None else NAMES[one.lora_task_id]
    return oracle.logits(name, prompt, answer, start_of(one))


def assert_as_peft(oracle: Oracle, requests: list[GenerationRequest], answers: dict[str, Answer]) -> None:
    for one in requests:
        answer = answers[one.request_id].token_ids
        assert len(answer) == one.sampling.max_tokens
        expected = expected_logits(oracle, one, one.prompt_token_ids, answer).argmax(dim=-1).tolist()
        assert answer == expected, one.request_id


def tokens(length: int, seed: int) -> list[int]:
    """Without those of any invocation."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, 299, (length,), generator=generator).tolist()


CONVERSATION = tokens(45, seed=1)
ASKED = [*CONVERSATION, 7, 9, *tokens(6, seed=2), 300, 12]
"""The judge and the guard start at 45, the extractor at 53."""


def questions() -> list[GenerationRequest]:
    """Of every adapter and the base, also at the ends of blocks, with two invocations, and with one cut in half."""
    twice = [*ASKED, 7, 9, 7]
    return [
        request("base", ASKED),
        request("judge", ASKED, JUDGE),
        request("plain", ASKED, PLAIN),
        request("guard", ASKED, GUARD),
        request("extractor", ASKED, EXTRACTOR),
        request("judge twice", twice, JUDGE),
        request("judge at once", [7, 9], JUDGE),
        request("judge at the end", [*CONVERSATION, 7, 9], JUDGE),
        *(request(f"at {start}", ASKED, POSITION, start) for start in (0, 1, 7, 8, 15, 16, 44, 46, len(ASKED) - 1)),
        request("moved", ASKED, JUDGE, 20),
    ]


@pytest.mark.parametrize(
    "options", [{"max_num_seqs": 20}, {"max_num_seqs": 7, "max_num_batched_tokens": 7, "enable_async_scheduling": True}]
)
def test_activated_adapters_answer_as_peft_does_in_a_mixed_batch(
    oracle: Oracle, default_model_dir: Path, options: dict[str, Any]
) -> None:
    engine = make_engine(oracle, default_model_dir, **options)
    requests = questions()
    answers = run_all(engine, requests)
    assert_as_peft(oracle, requests, answers)
    by_name = {name: answer.token_ids for name, answer in answers.items()}
    assert by_name["at 0"] != by_name["base"] != by_name["judge"] != by_name["plain"]
    again = run_all(engine, requests)
    assert {name: answer.token_ids for name, answer in again.items()} == by_name
    assert engine.stats.prefix_cache.base_hit_tokens > 0


def test_preemption_and_poisoned_blocks_move_no_position(oracle: Oracle, default_model_dir: Path) -> None:
    engine = make_engine(
        oracle, default_model_dir, num_blocks=30, max_num_seqs=20, max_num_batched_tokens=24, max_model_len=120
    )
    poison_claimed_blocks(engine)
    requests = questions()
    assert_as_peft(oracle, requests, run_all(engine, requests))
    assert engine.stats.num_preemptions > 0
    assert engine.stats.prefix_cache.base_hit_tokens > 0


def test_windows_of_attention_and_scaled_embeddings_change_nothing_of_that(
    default_model_dir: Path, tmp_path: Path
) -> None:
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(
        **TINY | {"pad_token_id": 0, "query_pre_attn_scalar": 10, "tie_word_embeddings": False},
        sliding_window=24,
        layer_types=layers,
    )
    oracle = with_adapters(Gemma3ForCausalLM, config, tmp_path)
    engine = make_engine(oracle, default_model_dir, max_num_seqs=5, max_num_batched_tokens=30)
    requests = questions()
    assert_as_peft(oracle, requests, run_all(engine, requests))


SHARED = 40
"""Tokens of the blocks that end before the judge's position."""


@pytest.mark.parametrize(
    ("warm", "asked", "num_cached"),
    [
        (None, JUDGE, SHARED),
        (GUARD, JUDGE, SHARED),
        (JUDGE, GUARD, SHARED),
        (JUDGE, None, SHARED),
        (EXTRACTOR, JUDGE, SHARED),
        (JUDGE, EXTRACTOR, SHARED),
        (JUDGE, JUDGE, 48),
        (PLAIN, JUDGE, 0),
        (JUDGE, PLAIN, 0),
    ],
)
def test_blocks_are_shared_with_the_base_and_with_each_other_and_change_no_token(
    oracle: Oracle, default_model_dir: Path, warm: int | None, asked: int | None, num_cached: int
) -> None:
    engine = make_engine(oracle, default_model_dir)
    run_all(engine, [request("warm", ASKED, warm)])
    before = engine.stats.prefix_cache
    one = request("asked", ASKED, asked)
    answers = run_all(engine, [one])
    assert_as_peft(oracle, [one], answers)
    final = answers["asked"].final
    assert final is not None
    assert final.num_cached_tokens == num_cached
    found = engine.stats.prefix_cache
    of_base = min(num_cached, SHARED) if asked is not None else 0
    assert (found.hit_tokens - before.hit_tokens, found.base_hit_tokens - before.base_hit_tokens) == (
        num_cached,
        of_base,
    )


def test_an_answer_of_the_base_is_reused_and_other_tenants_find_nothing(
    oracle: Oracle, default_model_dir: Path
) -> None:
    engine = make_engine(oracle, default_model_dir)
    told = run_all(engine, [request("base", CONVERSATION, tenant="acme", max_tokens=20)])["base"].token_ids
    prompt = [*CONVERSATION, *told, 7, 9]
    for tenant, num_cached in (("acme", 64), ("bolt", 0), ("", 0), ("acme", 64)):
        one = request("judge", prompt, JUDGE, tenant=tenant)
        answers = run_all(engine, [one])
        assert_as_peft(oracle, [one], answers)
        final = answers["judge"].final
        assert final is not None
        assert final.num_cached_tokens == num_cached


def keys_and_values(engine: Engine, one: GenerationRequest, num_tokens: int) -> list[torch.Tensor]:
    """Of the first tokens of a request, as they are when it has its first token."""
    engine.add_request(one)
    while not any(output.token_ids for output in engine.step()):
        pass
    (sequence,) = engine._live
    slots = [sequence.block_table.slot(position, BLOCK_SIZE) for position in range(num_tokens)]
    found = [cache[:, slots].clone() for cache in (engine._runner._kv_cache.keys, engine._runner._kv_cache.values)]
    engine.abort(one.request_id)
    assert_idle(engine)
    return found


@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 1, "max_num_batched_tokens": 6}, {"dtype": "bfloat16"}])
def test_keys_and_values_before_the_position_have_the_bits_of_the_base_s(
    oracle: Oracle, default_model_dir: Path, options: dict[str, Any]
) -> None:
    engine = make_engine(oracle, default_model_dir, enable_prefix_caching=False, **options)

    def found(task: int | None, start: int | None = None) -> list[torch.Tensor]:
        return keys_and_values(engine, request("r", ASKED, task, start), len(ASKED))

    base = found(None)
    for task, start in ((JUDGE, 45), (EXTRACTOR, 53), (POSITION, 3)):
        activated = found(task, None if task != POSITION else start)
        for of_base, of_adapter in zip(base, activated, strict=True):
            assert torch.equal(of_base[:, :start], of_adapter[:, :start])
            changed = (of_base != of_adapter).flatten(2).any(dim=2)
            assert changed[1:, start:].all(), "the adapter computes from its position on"


def test_log_probs_of_a_prompt_are_the_base_s_before_the_position_and_the_adapter_s_after(
    oracle: Oracle, default_model_dir: Path
) -> None:
    engine = make_engine(oracle, default_model_dir, max_num_seqs=9, max_num_batched_tokens=13)
    requests = [
        request(one.request_id, one.prompt_token_ids, one.lora_task_id, one.lora_start, return_prompt_log_probs=True)
        for one in questions()
    ]
    answers = run_all(engine, requests)
    assert_as_peft(oracle, requests, answers)
    for one in requests:
        rows = np.frombuffer(answers[one.request_id].prompt_log_probs, row_type(0))
        prompt = one.prompt_token_ids
        logits = expected_logits(oracle, one, prompt[:1], prompt[1:])
        expected = logits.log_softmax(dim=-1).gather(1, torch.tensor(prompt[1:])[:, None]).squeeze(1)
        np.testing.assert_allclose(rows["log_prob"][1:], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("num_blocks", [None, 30])
def test_beams_of_an_activated_adapter_have_its_log_probs(
    oracle: Oracle, default_model_dir: Path, num_blocks: int | None
) -> None:
    """PEFT searches no beams with activated adapters: each beam's tokens are scored by its forward pass instead."""
    engine = make_engine(
        oracle,
        default_model_dir,
        num_blocks,
        max_num_seqs=12,
        max_num_batched_tokens=20,
        max_model_len=120,
    )
    tasks = (JUDGE, GUARD, None)
    searches = [request(f"s{task}", [i, *ASKED], task, beam_width=3, max_tokens=15) for i, task in enumerate(tasks)]
    answers = run_all(engine, [*searches, request("extractor", ASKED, EXTRACTOR)])
    assert num_blocks is None or engine.stats.num_preemptions > 0
    for one in searches:
        final = answers[one.request_id].final
        assert final is not None
        assert len(final.beams) == 3
        for beam in final.beams:
            logits = expected_logits(oracle, one, one.prompt_token_ids, beam.token_ids)
            expected = logits.log_softmax(dim=-1).gather(1, torch.tensor(beam.token_ids)[:, None]).squeeze(1)
            told = [token.log_prob for token in beam.log_probs]
            np.testing.assert_allclose(told, expected, rtol=0, atol=TOLERANCE)


def test_invocation_tokens_in_the_answer_move_nothing(oracle: Oracle, default_model_dir: Path) -> None:
    """Nor when a preempted sequence starts again from prompt and answer."""
    options: dict[str, Any] = {"embedding_bias": ((300, 1e4),), "return_log_probs": True, "max_tokens": 24}
    requests = [request(f"r{i}", [*ASKED, i], EXTRACTOR, **options) for i in range(4)]
    engine = make_engine(
        oracle, default_model_dir, num_blocks=16, max_num_seqs=8, max_num_batched_tokens=24, max_model_len=120
    )
    answers = run_all(engine, requests)
    assert engine.stats.num_preemptions > 0
    for one in requests:
        answer = answers[one.request_id]
        assert answer.token_ids == [300] * 24
        expected = expected_logits(oracle, one, one.prompt_token_ids, answer.token_ids).log_softmax(dim=-1)[:, 300]
        np.testing.assert_allclose([t.log_prob for t in answer.log_probs], expected, rtol=0, atol=TOLERANCE)


def test_a_step_before_the_position_does_no_work_for_adapters(
    oracle: Oracle, default_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(oracle, default_model_dir, max_num_seqs=1, max_num_batched_tokens=10)
    mappings: list[list[int] | None] = []
    build_batch = engine._runner.build_batch

    def record(*arguments: Any) -> Any:
        batch = build_batch(*arguments)
        mappings.append(None if batch.lora is None else batch.lora.mapping.tolist())
        return batch

    monkeypatch.setattr(engine._runner, "build_batch", record)
    run_all(engine, [request("judge", ASKED, JUDGE, max_tokens=2)])
    *before, at, after, decode = mappings
    assert before == [None] * 4
    assert at is not None
    assert [index >= 0 for index in at] == [False] * 5 + [True] * 5
    for mapping, length in ((after, 5), (decode, 1)):
        assert mapping is not None
        assert len(mapping) == length
        assert set(mapping) == {at[-1]}


@pytest.mark.parametrize(
    ("one", "says"),
    [
        (
            request("r", CONVERSATION, JUDGE),
            r"LoRA task 0 is activated by the tokens \[7, 9\], which the prompt of 45 tokens does not have",
        ),
        (request("r", [9, 7], JUDGE), "which the prompt of 2 tokens does not have"),
        (request("r", [7], JUDGE), "which the prompt of 1 tokens does not have"),
        (request("r", ASKED, JUDGE, len(ASKED)), "lora_start is 55 and the prompt has 55 tokens, expected 0 .. 54"),
        (request("r", ASKED, PLAIN, -1), "lora_start is -1 and the prompt has 55 tokens"),
        (request("r", ASKED, None, 3), "lora_start is 3 and the request names no adapter"),
    ],
)
def test_an_adapter_that_would_compute_nothing_is_an_error_and_never_the_base(
    oracle: Oracle, default_model_dir: Path, engine: Engine, one: GenerationRequest, says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says):
        engine.add_request(one)
    assert_idle(engine)
    engine.check_integrity()


@pytest.fixture(scope="module")
def engine(oracle: Oracle, default_model_dir: Path) -> Engine:
    return make_engine(oracle, default_model_dir)


def test_an_activated_adapter_comes_back_from_disk_as_one(
    oracle: Oracle, default_model_dir: Path, tmp_path: Path
) -> None:
    lora = LoRAConfig(lora_cache_dir=tmp_path, lora_cache_host_memory_bytes=64 << 20)  # type: ignore[arg-type]
    make_engine(oracle, default_model_dir, lora=lora).close()
    checkpoint = next(iter(oracle.adapters.values())).parent / "checkpoint"
    config = EngineConfig(
        model_path=checkpoint,
        tokenizer_path=default_model_dir,
        num_threads=1,
        kv_cache_memory_bytes=TINY_KV_CACHE_BYTES,  # type: ignore[arg-type]
        lora=lora,
    )
    engine = Engine(config)
    with pytest.raises(InvalidRequest, match="is activated by the tokens"):
        engine.add_request(request("r", CONVERSATION, GUARD))
    engine.check_integrity()
    requests = questions()
    assert_as_peft(oracle, requests, run_all(engine, requests))
    engine.close()


def test_an_activated_adapter_of_a_source_is_refused_by_its_name_where_the_prompt_does_not_invoke_it(
    oracle: Oracle, default_model_dir: Path
) -> None:
    root = str(oracle.adapters["judge"].parent)
    source = SourceSpec.model_validate({"source": "directory", "root": root})
    lora = LoRAConfig(lora_sources=[source], lora_cache_host_memory_bytes=64 << 20)  # type: ignore[arg-type]
    engine = make_engine(oracle, default_model_dir, lora=lora)
    named = {"lora_task_id": task_id_of("judge"), "lora_name": "judge"}
    silent = msgspec.structs.replace(request("silent", CONVERSATION), **named)
    asked = msgspec.structs.replace(request("asked", ASKED), **named)
    answers = run_all(engine, [silent, asked])
    final = answers["silent"].final
    assert final is not None
    assert final.error_code == "INVALID_ARG"
    assert "'judge' is activated by the tokens [7, 9]" in (final.error_message or "")
    by_id = request("by id", ASKED, JUDGE)
    assert_as_peft(oracle, [by_id], {"by id": answers["asked"]})
    engine.close()


def drawn(random: Random) -> Iterator[GenerationRequest]:
    """Requests of two tenants for every adapter, over prompts that share beginnings."""
    prompts = [tokens(length, seed=length % 3) for length in (9, 17, 40)]
    for number in range(60):
        prompt = random.choice(prompts)[: random.randrange(1, 40)] + random.choice([[], [7, 9], [300], [7, 9, 300, 11]])
        task = random.choice([None, JUDGE, GUARD, EXTRACTOR, PLAIN, POSITION])
        is_activated = task in (JUDGE, GUARD, EXTRACTOR)
        may_find = is_activated and any(
            prompt[i : i + len(found)] == list(found)
            for found in [INVOCATIONS[NAMES[task or 0]]]
            for i in range(len(prompt))
        )
        start = None if task is None or may_find else random.randrange(len(prompt))
        yield request(
            f"r{number}", prompt, task, start, random.choice(["", "acme"]), max_tokens=random.randrange(1, 12)
        )


def test_reused_blocks_give_the_tokens_of_an_engine_that_computes_everything(
    oracle: Oracle, default_model_dir: Path, seed: int
) -> None:
    requests = list(drawn(Random(seed)))
    small: dict[str, Any] = {"max_num_seqs": 6, "max_num_batched_tokens": 24, "max_model_len": 80}
    reusing = make_engine(oracle, default_model_dir, num_blocks=24, **small)
    poison_claimed_blocks(reusing)
    recomputing = make_engine(oracle, default_model_dir, enable_prefix_caching=False)
    expected = run_all(recomputing, requests)
    answers = run_all(reusing, requests)
    for one in requests:
        assert answers[one.request_id].token_ids == expected[one.request_id].token_ids, one
    assert reusing.stats.prefix_cache.base_hit_tokens > 0
    assert recomputing.stats.prefix_cache.hit_tokens == 0
