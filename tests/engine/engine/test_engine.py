"""The engine's door: its refusals, the ends of requests, and that nothing of them is left."""

from __future__ import annotations

import gc
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from types import FunctionType, ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
import tokenizers
import torch
from support.adapters import wire_adapter
from support.engines import Answer, assert_idle, run_all
from transformers import LlamaForCausalLM

from checkpoints.tiny_llama import VOCAB_SIZE, save_tiny_llama
from multilora_engine.config import EngineConfig
from multilora_engine.engine import base_model, build
from multilora_engine.engine.engine import Engine
from multilora_engine.engine_info import CallLimits
from multilora_engine.errors import AdapterNotFound, ConfigError, InvalidRequest, QueueFull, QueueShareFull
from multilora_engine.lora import disk_tier
from multilora_engine.lora.checkpoint_layout import checkpoint_layout
from multilora_engine.lora.device_tier import DeviceTier
from multilora_engine.lora.disk_tier import write_file_atomically
from multilora_engine.lora.format import pack_adapter
from multilora_engine.lora.free_pages import PagePool
from multilora_engine.lora.life_cycle import OnEvent
from multilora_engine.lora.names import TenantTaskId
from multilora_engine.lora.page_copies import PageCopy, copy_at_once
from multilora_engine.lora_config import LoRAConfig
from multilora_engine.process.messages import Welcome, decode_from_engine, encode
from multilora_engine.request import GenerationRequest, Guide, SamplingParams, Sender
from multilora_engine.sampling.sampler import Choice
from multilora_wire.layout import AdapterLayout


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


def make_engine(checkpoint: Path, tokenizer: Path, **options: object) -> Engine:
    """By default with no more blocks than needed: every one is looked at after every step."""
    options = {"kv_cache_memory_bytes": 8 << 20} | options
    config = EngineConfig(model_path=checkpoint, tokenizer_path=tokenizer, num_threads=1, **options)  # type: ignore[arg-type]
    engine = Engine(config)
    for task in range(3):
        wire = wire_adapter(engine.info.adapter_layout, [(1, 0, 4), (6, 1, 2 + task)], seed=task, scale=0.5)
        engine.put_adapter(task, pack_adapter(wire.weights, wire.config, engine.info.adapter_layout))
    return engine


@pytest.fixture(scope="module")
def engine(checkpoint: Path, default_model_dir: Path) -> Engine:
    return make_engine(checkpoint, default_model_dir, max_queue_size=50)


def request(name: str, prompt: list[int], task: int | None = None, **sampling: object) -> GenerationRequest:
    parameters = SamplingParams(**{"max_tokens": 8, "end_id": -1, **sampling})  # type: ignore[arg-type]
    return GenerationRequest(name, prompt, parameters, lora_task_id=task)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request("r", []), "the prompt is empty"),
        (request("r", [1] * 512), "the prompt has 512 tokens and max_model_len is 512"),
        (request("r", [1, 2, VOCAB_SIZE]), "input_ids holds 311 at position 2, expected 0 .. 310"),
        (request("r", [1, -5]), "input_ids holds -5 at position 1"),
        (request("r", [1] * 513, max_tokens=0), "the prompt has 513 tokens and max_model_len is 512"),
        (request("r", [1], max_tokens=0, beam_width=2), "max_tokens is 0 with beam_width > 1"),
        (request("r", [1], max_tokens=-3), "max_tokens is -3"),
        (request("r", [1], end_id=-2), "end_id is -2"),
        (request("r", [1], end_id=VOCAB_SIZE), "end_id is 311"),
        (request("r", [1], task=0, stop_words=("",)), "stop word 0 is empty"),
        (request("r", [1], embedding_bias=((VOCAB_SIZE, 1.0),)), "embedding_bias has the token 311, expected 0 .. 310"),
        (request("r", [1], embedding_bias=((3, 1.0), (3, 2.0))), "embedding_bias has 2 biases of token 3; send one"),
        (request("r", [1], stop_token_sequences=((1, 999),)), "stop_words_list has the token 999, expected 0 .. 310"),
        (request("r", [1], bad_token_sequences=((1, -1),)), "bad_words_list has the token -1"),
        (request("r", [1], bad_token_sequences=((1,), ())), "bad_words_list: word 1 has no tokens"),
        (request("r", [1], num_top_log_probs=101), "num_top_log_probs is 101, expected 0 .. 100"),
        (request("r", [1], num_prompt_top_log_probs=21), "num_prompt_top_log_probs is 21, expected 0 .. 20"),
    ],
)
def test_bad_requests_are_refused_with_the_numbers_and_leave_nothing(
    engine: Engine, bad: GenerationRequest, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        engine.add_request(bad)
    assert_idle(engine)


def test_what_the_fronts_must_know_travels_to_them(engine: Engine) -> None:
    assert decode_from_engine(memoryview(encode(Welcome(engine.info)))) == Welcome(engine.info)


def test_what_every_step_reads_begins_with_a_huge_page(engine: Engine) -> None:
    kv_cache = engine._runner._kv_cache
    for memory in (kv_cache.keys, kv_cache.values, engine._loras.device.tables.arena):
        assert memory.data_ptr() % (2 << 20) == 0


def test_an_uncached_adapter_is_an_error_and_never_the_base_model(engine: Engine) -> None:
    with pytest.raises(AdapterNotFound, match=r"LoRA task 404 not found in cache\. Please send LoRA weights"):
        engine.add_request(request("r", [1], task=404))
    assert_idle(engine)


def test_a_full_queue_refuses_and_takes_no_pin(checkpoint: Path, default_model_dir: Path) -> None:
    engine = make_engine(checkpoint, default_model_dir, max_queue_size=2)
    for i in range(2):
        engine.add_request(request(f"r{i}", [1], task=0))
    message = r"2 requests are waiting and max_queue_size is 2; the oldest has waited \d+\.\d s"
    with pytest.raises(QueueFull, match=message):
        engine.add_request(request("r2", [1], task=0))
    assert engine.stats.num_pins == 2
    engine.close()
    assert_idle(engine)


def test_a_client_fills_its_share_of_the_queue_and_others_have_room(checkpoint: Path, default_model_dir: Path) -> None:
    engine = make_engine(checkpoint, default_model_dir, max_queue_size=4)

    def add(name: str, client: str) -> None:
        sender = Sender(tenant=client, name=client)
        engine.add_request(msgspec.structs.replace(request(name, [1]), sender=sender))

    add("a1", "acme")
    add("a2", "acme")
    with pytest.raises(QueueShareFull, match="2 of its requests wait or run, and 2 may"):
        add("a3", "acme")
    add("b1", "bolt")
    engine.abort("a1")
    add("a3", "acme")
    add("c1", "")
    engine.check_integrity()
    with pytest.raises(QueueFull):
        add("c2", "")
    engine.close()
    assert_idle(engine)


def test_an_adapter_of_a_tenant_answers_its_requests_alone(checkpoint: Path, default_model_dir: Path) -> None:
    engine = make_engine(checkpoint, default_model_dir)
    wire = wire_adapter(engine.info.adapter_layout, [(0, 0, 4)], seed=5)
    engine.put_adapter(TenantTaskId("acme", 77), pack_adapter(wire.weights, wire.config, engine.info.adapter_layout))
    with pytest.raises(AdapterNotFound, match="LoRA task 77 not found in cache"):
        engine.add_request(request("r", [1], task=77))
    with pytest.raises(AdapterNotFound, match="LoRA task 77 not found in cache"):
        engine.add_request(msgspec.structs.replace(request("r", [1], task=77), adapter_tenant="bolt"))
    owned = msgspec.structs.replace(request("r", [1], task=77), adapter_tenant="acme")
    answers = run_all(engine, [owned])
    assert answers["r"].final is not None
    assert answers["r"].final.lora_digest == engine.loras.inventory.info(TenantTaskId("acme", 77)).digest


def test_length_ends_an_answer_at_max_tokens_and_at_the_context(engine: Engine) -> None:
    answers = run_all(engine, [request("short", [1, 2]), request("long", [3] * 505, max_tokens=100)])
    assert [len(answers[i].token_ids) for i in ("short", "long")] == [8, 7]
    assert all(answer.final is not None and answer.final.finish_reason == "length" for answer in answers.values())
    assert answers["long"].final is not None
    assert answers["long"].final.num_output_tokens == 7


@pytest.mark.parametrize("length", [1, 15, 16, 17, 500, 512])
def test_no_token_at_all_is_an_answer_too(checkpoint: Path, default_model_dir: Path, length: int) -> None:
    engine = make_engine(checkpoint, default_model_dir, max_num_batched_tokens=64)
    prompt = [i % 7 for i in range(length)]
    guide = Guide("regex", "a+")
    requests = [request(f"r{task}", prompt, task=task, max_tokens=0, guide=guide) for task in (None, 0, 1)]
    for answer in run_all(engine, requests).values():
        assert answer.final is not None
        assert (answer.token_ids, answer.text, answer.final.finish_reason) == ([], "", "length")
        assert (answer.final.num_prompt_tokens, answer.final.num_output_tokens) == (length, 0)
        assert answer.final.perf is not None
        assert answer.final.perf.first_scheduled_time_ns > 0
        assert answer.final.perf.first_token_time_ns == 0
    # The prompt was computed: others find it.
    final = run_all(engine, [request("after", prompt, max_tokens=0)])["after"].final
    assert final is not None
    assert final.num_cached_tokens == (length - 1) // 16 * 16


def test_a_request_is_told_how_much_of_its_prompt_was_cached_when_it_first_started(
    checkpoint: Path, default_model_dir: Path
) -> None:
    prompt = [8, 7, 6, 5] * 5
    roomy = make_engine(checkpoint, default_model_dir)
    told = []
    for _ in range(2):
        roomy.add_request(request("r", prompt, task=1, max_tokens=3))
        while roomy.has_work:
            told += [output.num_cached_tokens for output in roomy.step()]
    assert told == [0] * 3 + [16] * 3
    tight = make_engine(checkpoint, default_model_dir, max_model_len=64, kv_cache_memory_bytes=40 * 1024)
    answers = run_all(tight, [request(f"r{i}", [i + 1] * 20, max_tokens=40) for i in range(4)])
    assert tight.stats.num_preemptions > 0
    assert tight.stats.prefix_cache.hit_tokens > 0, "who started again found its own"
    assert [answer.final and answer.final.num_cached_tokens for answer in answers.values()] == [0] * 4


def test_an_end_token_ends_an_answer_and_is_its_last_token(engine: Engine) -> None:
    free = run_all(engine, [request("r", [5, 6])])["r"].token_ids
    end = next(token for token in free[2:] if token not in free[:2])
    ended = run_all(engine, [request("r", [5, 6], end_id=end)])["r"]
    assert ended.token_ids == free[: free.index(end) + 1]
    assert ended.final is not None
    assert ended.final.finish_reason == "stop"


def test_a_stop_word_cuts_the_text_and_says_stop(engine: Engine) -> None:
    free = run_all(engine, [request("r", [9, 8], max_tokens=30)])["r"].text
    word = free[7:11]
    stopped = run_all(engine, [request("r", [9, 8], max_tokens=30, stop_words=(word, "never seen"))])["r"]
    assert stopped.text == free[: free.index(word)]
    assert stopped.final is not None
    assert stopped.final.finish_reason == "stop"


@pytest.fixture(scope="module")
def vocabulary(default_model_dir: Path) -> tokenizers.Tokenizer:
    """The engine's tokenizer, as its own library has it."""
    return tokenizers.Tokenizer.from_file(str(default_model_dir / "tokenizer.json"))


@pytest.mark.parametrize(
    ("word", "rest"),
    [("<|im_start|>", ""), ("<|im_start|>m", "m"), ("el<|im_start|>", "el"), ("<|im_start|>mel<|im_start|>", "mel")],
)
@pytest.mark.parametrize("options", [{}, {"min_tokens": 29}, {"include_stop_str_in_output": True}])
def test_a_stop_word_that_spells_special_tokens_ends_an_answer_at_these_tokens(
    engine: Engine, vocabulary: tokenizers.Tokenizer, word: str, rest: str, options: dict[str, Any]
) -> None:
    """rest: the word without special tokens."""
    wanted = {"max_tokens": 30, "embedding_bias": ((1, 3.0),), "return_log_probs": True}
    free = run_all(engine, [request("r", [1, 2, 3], **wanted)])["r"].token_ids
    num_tokens = next(n for n in range(31) if word in vocabulary.decode(free[:n], skip_special_tokens=False))
    text = vocabulary.decode(free[:num_tokens])
    answer = run_all(engine, [request("r", [1, 2, 3], stop_words=("never", word), **wanted, **options)])["r"]
    assert answer.token_ids == free[:num_tokens]
    assert answer.text == (text if "include_stop_str_in_output" in options else text.removesuffix(rest))
    assert len(answer.log_probs) == num_tokens
    assert answer.final is not None
    assert (answer.final.finish_reason, answer.final.num_output_tokens) == ("stop", num_tokens)


def test_a_guide_keeps_a_special_token_from_ending_an_answer_too_early(engine: Engine) -> None:
    """It is a stop word, and likelier than all else; as an end token it ends the answer once the answer parses."""
    wanted = {"embedding_bias": ((1, 50.0),), "stop_words": ("<|im_start|>",), "guide": Guide("regex", "[0-9]{3}")}
    for end_id in (-1, 1):
        answer = run_all(engine, [request("r", [1, 2, 3], end_id=end_id, **wanted)])["r"]
        assert (len(answer.text), answer.text.isdigit()) == (3, True)
        assert answer.final is not None
        assert answer.final.finish_reason == "stop"


def test_an_end_token_completes_a_stop_word(engine: Engine, vocabulary: tokenizers.Tokenizer) -> None:
    wanted = {"max_tokens": 30, "embedding_bias": ((1, 3.0),), "end_id": 1}
    whole = run_all(engine, [request("r", [20, 30, 40], **wanted)])["r"]
    assert vocabulary.decode(whole.token_ids, skip_special_tokens=False).endswith(",<|im_start|>")
    for word, cut in {",<|im_start|>": ",", "<|im_start|>": "", "im_start|>": "", "<|im_end|>": ""}.items():
        answer = run_all(engine, [request("r", [20, 30, 40], stop_words=(word,), **wanted)])["r"]
        assert (answer.token_ids, answer.text) == (whole.token_ids, whole.text.removesuffix(cut))


def test_a_stop_token_sequence_cuts_the_text_and_ends_the_tokens(engine: Engine) -> None:
    free = run_all(engine, [request("r", [9, 8], max_tokens=30)])["r"].token_ids
    stopped = run_all(engine, [request("r", [9, 8], max_tokens=30, stop_token_sequences=(tuple(free[5:8]), (1, 2)))])[
        "r"
    ]
    assert stopped.token_ids == free[:8]
    assert stopped.text == run_all(engine, [request("r", [9, 8], max_tokens=5)])["r"].text
    assert stopped.final is not None
    assert stopped.final.finish_reason == "stop"


def test_times_and_blocks_of_a_request_are_told_with_its_last_output(engine: Engine) -> None:
    before = time.time_ns()
    engine.add_request(request("r", [1] * 20, max_tokens=20))
    outputs = [output for _ in range(20) for output in engine.step()]
    assert all(output.perf is None for output in outputs[:-1])
    perf = outputs[-1].perf
    assert perf is not None
    times = [perf.arrival_time_ns, perf.first_scheduled_time_ns, perf.first_token_time_ns, perf.last_token_time_ns]
    order = [before, *times, time.time_ns()]
    assert order == sorted(order)
    assert perf.first_token_time_ns < perf.last_token_time_ns
    # 39 tokens have keys and values, 16 in a block: the last token has none.
    assert (perf.kv_cache_alloc_total_blocks, perf.kv_cache_alloc_new_blocks, perf.kv_cache_reused_blocks) == (3, 3, 0)


def test_a_request_may_be_told_its_times_and_blocks_all_along(engine: Engine) -> None:
    engine.add_request(msgspec.structs.replace(request("r", [3] * 20, max_tokens=20), tells_perf=True))
    told = [output.perf for _ in range(20) for output in engine.step()]

    blocks = [perf.kv_cache_alloc_total_blocks for perf in told if perf is not None]
    assert (len(blocks), blocks[0], blocks[-1]) == (len(told), 2, 3)
    assert blocks == sorted(blocks)


def test_log_probs_are_those_of_transformers_one_for_each_token(engine: Engine, checkpoint: Path) -> None:
    oracle = LlamaForCausalLM.from_pretrained(checkpoint).eval()
    wanted = {"return_log_probs": True, "num_top_log_probs": 2}
    free = run_all(engine, [request("free", [9, 8], max_tokens=20, **wanted)])["free"]
    requests = [
        request("stopped", [9, 8], max_tokens=20, stop_words=(free.text[7:11],), **wanted),
        request("penalised", [9, 8], max_tokens=20, top_k=0, seed=1, repetition_penalty=1.5, **wanted),
        request("silent", [9, 8], max_tokens=20),
    ]
    answers = run_all(engine, requests)
    assert answers["silent"].log_probs == []
    for answer in (free, answers["stopped"], answers["penalised"]):
        with torch.inference_mode():
            logits = oracle(torch.tensor([[9, 8, *answer.token_ids[:-1]]])).logits[0, 1:]
        expected = logits.log_softmax(-1)
        chosen = expected.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert [token.log_prob for token in answer.log_probs] == pytest.approx(chosen.tolist(), abs=1e-4)
        assert [next(zip(*token.top, strict=True)) for token in answer.log_probs] == [
            tuple(row) for row in expected.topk(2).indices.tolist()
        ]
        assert answer.final is not None
        assert answer.final.cum_log_prob == pytest.approx(float(chosen.sum()), abs=1e-3)


def logits_of(values: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(values, np.float32).copy()).view(-1, VOCAB_SIZE)


def test_logits_are_those_of_transformers_whatever_the_chunks_and_the_cache(
    checkpoint: Path, default_model_dir: Path
) -> None:
    oracle = LlamaForCausalLM.from_pretrained(checkpoint).eval()
    engine = make_engine(checkpoint, default_model_dir, max_num_batched_tokens=24, max_num_seqs=8)
    wanted = {"return_context_logits": True, "return_generation_logits": True}
    prompt = [i % 7 for i in range(40)]
    requests = [
        request("both", prompt, repetition_penalty=3.0, bad_token_sequences=((5,),), **wanted),
        request("again", prompt, **wanted),
        request("answer", prompt[:3], return_generation_logits=True, stop_words=("never",)),
        request("neither", prompt[:20]),
    ]
    run_all(engine, [request("before", prompt)])
    outputs = {name: Answer() for name in ("both", "again", "answer", "neither")}
    context, generation = dict.fromkeys(outputs, b""), dict.fromkeys(outputs, b"")
    for one in requests:
        engine.add_request(one)
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].add(output)
            is_part = len(output.context_logits) < 40 * VOCAB_SIZE * 4
            assert is_part, "a prompt of 40 tokens is computed, and leaves, in two steps at least"
            assert not output.context_logits or not outputs[output.request_id].token_ids[len(output.token_ids) :]
            context[output.request_id] += output.context_logits
            generation[output.request_id] += output.generation_logits
            if output.generation_logits:
                assert len(logits_of(output.generation_logits)) == len(output.token_ids)
        engine.check_integrity()
    for one in requests:
        answer = outputs[one.request_id].token_ids
        with torch.inference_mode():
            expected = oracle(torch.tensor([one.prompt_token_ids + answer])).logits[0]
        num_prompt = len(one.prompt_token_ids)
        if one.sampling.return_context_logits:
            torch.testing.assert_close(logits_of(context[one.request_id]), expected[:num_prompt], rtol=0, atol=1e-4)
        if one.sampling.return_generation_logits:
            rows = expected[num_prompt - 1 : -1]
            torch.testing.assert_close(logits_of(generation[one.request_id]), rows, rtol=0, atol=1e-4)
    assert (context["answer"], context["neither"], generation["neither"]) == (b"", b"", b"")


def test_an_answer_has_the_same_bits_however_its_prompt_is_cut(checkpoint: Path, default_model_dir: Path) -> None:
    """By the budget of a step, into pieces of one token, too, and by what the cache has of it: all but one token."""
    prompt = [i % 7 for i in range(41)]

    def logits(engine: Engine) -> bytes:
        one = request("r", prompt, return_generation_logits=True)
        engine.add_request(one)
        found = b""
        while engine.has_work:
            for output in engine.step():
                found += output.generation_logits
        return found

    whole = logits(make_engine(checkpoint, default_model_dir, enable_prefix_caching=False))
    assert whole
    # Pieces of 40 and 1, 20 and 1, 1 and 1.
    for budget in (40, 20, 1):
        options = {"max_num_batched_tokens": budget, "max_num_seqs": 1, "enable_prefix_caching": False}
        assert logits(make_engine(checkpoint, default_model_dir, **options)) == whole
    keeping = make_engine(checkpoint, default_model_dir, block_size=4)
    assert logits(keeping) == logits(keeping) == whole
    assert keeping.stats.prefix_cache.hit_tokens == 40


def test_preempted_requests_get_their_logits_once(checkpoint: Path, default_model_dir: Path) -> None:
    wanted = {"return_context_logits": True, "return_generation_logits": True}
    requests = [request(f"r{i}", [i + 1] * 20, max_tokens=40, stop_words=("\x00",), **wanted) for i in range(4)]
    tight = make_engine(checkpoint, default_model_dir, max_model_len=64, kv_cache_memory_bytes=40 * 1024)
    received = {one.request_id: [0, 0] for one in requests}
    for one in requests:
        tight.add_request(one)
    while tight.has_work:
        for output in tight.step():
            received[output.request_id][0] += len(logits_of(output.context_logits))
            received[output.request_id][1] += len(logits_of(output.generation_logits))
    assert tight.stats.num_preemptions > 0
    assert set(map(tuple, received.values())) == {(20, 40)}


def test_more_logits_than_the_limit_are_refused_with_the_numbers(
    checkpoint: Path, default_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_model, "CallLimits", partial(CallLimits, max_logits_bytes=10 * VOCAB_SIZE * 4))
    engine = make_engine(checkpoint, default_model_dir)
    wanted = {"return_context_logits": True, "return_generation_logits": True}
    with pytest.raises(InvalidRequest, match=r"the logits of 11 tokens are 13684 bytes; a request may have 12440:"):
        engine.add_request(request("r", [1, 2, 3], **wanted))
    run_all(engine, [request("r", [1, 2], **wanted)])


def test_preemption_changes_no_token_no_penalty_and_no_log_prob(checkpoint: Path, default_model_dir: Path) -> None:
    options: dict[str, object] = {
        "max_tokens": 40,
        "top_k": 0,
        "top_p": 0.9,
        "top_p_decay": 0.95,
        "top_p_min": 0.1,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.1,
        "embedding_bias": ((5, 2.0),),
        "bad_token_sequences": ((7,), (5, 5)),
        "return_log_probs": True,
    }
    requests = [request(f"r{i}", [i + 1] * 20, seed=i, **options) for i in range(4)]
    roomy = make_engine(checkpoint, default_model_dir)
    tight = make_engine(checkpoint, default_model_dir, max_model_len=64, kv_cache_memory_bytes=40 * 1024)
    alone = [run_all(roomy, [one])[one.request_id] for one in requests]
    crowded = run_all(tight, requests)
    assert tight.stats.num_preemptions > 0
    for one, expected in zip(requests, alone, strict=True):
        answer = crowded[one.request_id]
        assert answer.token_ids == expected.token_ids
        assert [token.log_prob for token in answer.log_probs] == pytest.approx(
            [token.log_prob for token in expected.log_probs], abs=1e-4
        )


def test_a_request_that_forbids_every_token_fails_alone(engine: Engine) -> None:
    everything = tuple((token_id,) for token_id in range(VOCAB_SIZE))
    answers = run_all(engine, [request("dead", [1], bad_token_sequences=everything), request("alive", [1])])
    assert answers["dead"].final is not None
    assert answers["dead"].final.error_code == "INVALID_ARG"
    assert answers["dead"].final.error_message == (
        "after 0 tokens, the request's bad words forbid every token of the vocabulary"
    )
    assert len(answers["alive"].token_ids) == 8


def test_the_digest_of_the_adapter_that_answered_is_told(engine: Engine) -> None:
    answers = run_all(engine, [request("base", [7]), request("one", [7], task=1), request("two", [7], task=2)])
    digests = {name: answer.final.lora_digest for name, answer in answers.items() if answer.final}
    assert digests == {
        "base": "",
        "one": engine.loras.inventory.info(1).digest,
        "two": engine.loras.inventory.info(2).digest,
    }


def test_a_new_version_of_an_adapter_never_answers_from_the_cache_of_the_old_one(
    checkpoint: Path, default_model_dir: Path
) -> None:
    engine = make_engine(checkpoint, default_model_dir, lora=LoRAConfig(lora_on_conflict="replace"))
    fresh = make_engine(checkpoint, default_model_dir, enable_prefix_caching=False)
    layout = engine.info.adapter_layout
    wire = wire_adapter(layout, [(1, 0, 4), (6, 1, 3)], seed=77, scale=0.5)
    prompt = [8, 7, 6, 5] * 12
    old = run_all(engine, [request("r", prompt, task=1)])["r"]
    again = run_all(engine, [request("r", prompt, task=1)])["r"]
    assert again.token_ids == old.token_ids
    assert engine.stats.prefix_cache.hit_tokens == 32
    fresh.put_adapter(9, pack_adapter(wire.weights, wire.config, layout))
    engine.put_adapter(1, pack_adapter(wire.weights, wire.config, layout))
    new = run_all(engine, [request("r", prompt, task=1)])["r"]
    assert engine.stats.prefix_cache.hit_tokens == 32
    assert new.token_ids != old.token_ids
    assert new.token_ids == run_all(fresh, [request("r", prompt, task=9)])["r"].token_ids
    base = [run_all(each, [request("r", prompt)])["r"].token_ids for each in (engine, fresh)]
    assert base[0] == base[1]


@pytest.mark.parametrize("scale", [65504.0, 1e30])
def test_an_adapter_whose_numbers_overflow_is_an_error_that_names_it_and_changes_nobody_else(
    checkpoint: Path, default_model_dir: Path, scale: float
) -> None:
    engine = make_engine(checkpoint, default_model_dir)
    layout = engine.info.adapter_layout
    wire = wire_adapter(layout, [(module, layer, 4) for module in range(1, 8) for layer in range(2)], seed=1)
    engine.put_adapter(7, pack_adapter(wire.weights * scale, wire.config, layout))
    options = [{}, {"temperature": 0.7, "top_k": 0}, {"top_k": 0, "top_p": 0.8}, {"return_log_probs": True}]
    wrong = [request(f"w{i}", [1, 2, 3], task=7, **one) for i, one in enumerate([*options, {"beam_width": 3}])]
    right = [request(f"r{task}", [1, 2, 3], task=task) for task in (None, 0, 1)]
    alone = run_all(engine, right)
    answers = run_all(engine, [right[0], *wrong, *right[1:]])
    for one in wrong:
        final = answers[one.request_id].final
        assert final is not None
        assert final.error_code == "INVALID_ARG"
        assert (final.error_message or "").startswith("the numbers overflow with the weights of LoRA task 7 (digest ")
    assert {r.request_id: answers[r.request_id].token_ids for r in right} == {n: a.token_ids for n, a in alone.items()}


def test_an_aborted_request_ends_once_with_what_it_had(engine: Engine) -> None:
    expected = run_all(engine, [request("r", [4, 4])])["r"]
    engine.add_request(request("r", [4, 4], task=None))
    answer = Answer()
    for _ in range(4):
        for output in engine.step():
            answer.add(output)
    final = engine.abort("r")
    assert final is not None
    answer.add(final)
    assert final.finish_reason == "cancelled"
    assert answer.token_ids == expected.token_ids[:4]
    assert engine.abort("r") is None
    assert_idle(engine)


def test_a_deadline_ends_running_and_waiting_requests_with_an_error(checkpoint: Path, default_model_dir: Path) -> None:
    engine = make_engine(checkpoint, default_model_dir, request_timeout_s=1e-9, max_num_seqs=1)
    for i in range(3):
        engine.add_request(request(f"r{i}", [1], task=i))
    outputs = engine.step()
    assert [output.error_code for output in outputs] == ["CANCELLED"] * 3
    assert_idle(engine)


@pytest.mark.parametrize("allocation", ["on a GPU", "by torch on a CPU", "by Python"])
def test_a_step_out_of_memory_fails_its_requests_and_the_engine_goes_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, allocation: str
) -> None:
    def launch(*_: object) -> Choice:
        match allocation:
            case "on a GPU":
                raise torch.OutOfMemoryError("3 GiB wanted")
            case "by torch on a CPU":
                torch.empty(1 << 60, dtype=torch.uint8)
            case _:
                bytearray(1 << 60)
        raise AssertionError("there is no such memory")

    engine.add_request(request("r", [1], task=0))
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "launch", launch)
        (output,) = engine.step()
    assert output.error_code == "INTERNAL"
    assert "the step ran out of memory" in (output.error_message or "")
    assert_idle(engine)
    assert len(run_all(engine, [request("r", [1], task=0)])["r"].token_ids) == 8


SHARED = (type, ModuleType, logging.Logger)
"""Objects by which all code of the process is reached."""


def test_ten_thousand_tiny_requests_with_aborts_leave_nothing(engine: Engine, seed: int) -> None:
    rng = Random(seed)
    serve_tiny_requests(engine, 1_000, rng)
    num_objects = count_objects(engine)
    serve_tiny_requests(engine, 9_000, rng)
    assert count_objects(engine) - num_objects < 50
    assert engine.stats.num_cached_adapters == 3


def count_objects(engine: Engine) -> int:
    """Objects that the engine holds, itself or by others. Those of the process change with other tests' threads."""
    gc.collect()
    found: dict[int, object] = {}
    left: list[object] = [engine]
    while left:
        some = left.pop()
        if id(some) not in found and not isinstance(some, SHARED):
            found[id(some)] = some
            left += (some.__closure__ or ()) if isinstance(some, FunctionType) else gc.get_referents(some)
    return sum(map(gc.is_tracked, found.values()))


def serve_tiny_requests(engine: Engine, count: int, rng: Random) -> None:
    """Random prompts with common prefixes and random adapters; one in some is aborted, waiting or running."""
    unfinished: dict[str, Answer] = {}
    started = 0
    while started < count or unfinished:
        while started < count and len(unfinished) < 40:
            prompt = [1 + started % 3] * rng.randrange(1, 20) + [rng.randrange(300)]
            engine.add_request(request(f"r{started}", prompt, rng.choice([None, 0, 1, 2]), max_tokens=2))
            unfinished[f"r{started}"] = Answer()
            started += 1
        if rng.random() < 0.2:
            victim = rng.choice(list(unfinished))
            output = engine.abort(victim)
            assert output is not None
            del unfinished[victim]
        for output in engine.step():
            unfinished[output.request_id].add(output)
            if output.is_final:
                del unfinished[output.request_id]
    engine.check_integrity()
    assert_idle(engine)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora": LoRAConfig(lora_cache_host_memory_bytes=4096)}, "Not enough space allocated to host LoRA cache"),
        ({"max_model_len": 512, "kv_cache_memory_bytes": 100_000}, "fewer than max_model_len .512."),
        ({"kv_cache_memory_bytes": 1}, "the KV cache holds 0 tokens"),
        ({"dtype": "bfloat16", "weight_dtype": "float32"}, "computing in bfloat16, weights are stored as bfloat16"),
        ({"dtype": "bfloat16", "kv_cache_dtype": "float32"}, "keys and values are computed in bfloat16"),
        ({"dtype": "float16", "kv_cache_dtype": "bfloat16"}, "keys and values are computed in float16"),
    ],
)
def test_a_configuration_that_cannot_work_stops_the_load(
    checkpoint: Path, default_model_dir: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(checkpoint, default_model_dir, **options)


def test_adapters_on_disk_answer_after_a_restart_and_a_damaged_file_fails_only_its_own_requests(
    checkpoint: Path, default_model_dir: Path, tmp_path: Path
) -> None:
    lora = LoRAConfig(lora_cache_dir=tmp_path)
    engine = make_engine(checkpoint, default_model_dir, lora=lora)
    before = run_all(engine, [request(f"r{task}", [5, 6, 7], task=task) for task in range(3)])
    engine.close()
    path = tmp_path / "1.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)

    restarted = Engine(EngineConfig(model_path=checkpoint, tokenizer_path=default_model_dir, num_threads=1, lora=lora))
    requests = [request(f"r{task}", [5, 6, 7], task=task) for task in range(3)]
    after = run_all(restarted, [*requests, request("base", [5, 6, 7])])
    damaged = after["r1"].final
    assert damaged is not None
    assert damaged.error_code == "NOT_FOUND"
    assert "LoRA task 1 not found in cache. Please send LoRA weights with request" in (damaged.error_message or "")
    assert "its file in lora_cache_dir could not be read" in (damaged.error_message or "")
    assert [after[name].token_ids for name in ("r0", "r2")] == [before[name].token_ids for name in ("r0", "r2")]
    assert len(after["base"].token_ids) == 8
    with pytest.raises(AdapterNotFound):
        restarted.add_request(request("again", [1], task=1))
    restarted.close()
    assert not path.exists()


def test_a_failing_copy_to_the_device_fails_the_requests_that_waited_for_it_and_a_later_one_is_answered(
    checkpoint: Path, default_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_broken = True

    def copy_pages(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> PageCopy:
        if is_broken:
            raise RuntimeError("CUDA error: invalid argument")
        return copy_at_once(sources, targets)

    def device_tier(
        layout: AdapterLayout,
        host: PagePool,
        device: PagePool,
        max_loras: int,
        on_event: OnEvent,
        is_device_dead: Callable[[], bool],
    ) -> DeviceTier:
        """With pages of its own, as on a GPU."""
        pool = PagePool(4, layout.page_bytes, torch.device("cpu"))
        return DeviceTier(layout, host, pool, max_loras, on_event, copy_pages, is_device_dead)

    monkeypatch.setattr(build, "DeviceTier", device_tier)
    engine = make_engine(checkpoint, default_model_dir)
    requests = [request("base", [5, 6, 7]), *(request(f"r{n}", [5, 6, 7], task=n // 2) for n in range(4))]
    failed = run_all(engine, requests)
    for name in ("r0", "r1", "r2", "r3"):
        final = failed[name].final
        assert final is not None
        assert final.error_code == "UNAVAILABLE"
        assert "copying it to the device failed: CUDA error" in (final.error_message or "")
    assert len(failed["base"].token_ids) == 8
    is_broken = False
    monkeypatch.undo()
    shared = make_engine(checkpoint, default_model_dir)
    after, expected = run_all(engine, requests), run_all(shared, requests)
    assert [after[r.request_id].token_ids for r in requests] == [expected[r.request_id].token_ids for r in requests]


def test_a_step_shows_progress_at_every_layer_that_begins_late(engine: Engine) -> None:
    num_layers, progress = engine.info.adapter_layout.sites.num_layers, []

    def show() -> None:
        progress.append(None)
        begin = time.perf_counter()
        while time.perf_counter() < begin + 0.011:
            pass

    engine.add_request(request("r", [1, 2, 3], max_tokens=2))
    engine.step(show)
    assert len(progress) == num_layers
    engine.step(show)
    assert len(progress) == 2 * num_layers
    assert_idle(engine)


def test_a_disk_that_blocks_does_not_stop_the_steps(
    checkpoint: Path, default_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()

    def write_late(path: Path, header: bytes, pages: list[torch.Tensor]) -> None:
        assert may_write.wait(60)
        write_file_atomically(path, header, pages)

    monkeypatch.setattr(disk_tier, "write_file_atomically", write_late)
    lora = LoRAConfig(max_lora_rank=1, lora_cache_dir=tmp_path, lora_cache_host_memory_bytes=2 << 18)
    config = EngineConfig(model_path=checkpoint, tokenizer_path=default_model_dir, num_threads=1, lora=lora)
    engine, layout = Engine(config), checkpoint_layout(checkpoint, 1, "float32")
    for task in range(3):
        wire = wire_adapter(layout, [(1, 0, 1)], seed=task, scale=0.5)
        engine.put_adapter(task, pack_adapter(wire.weights, wire.config, layout))
    engine.add_request(request("r1", [2] * 5, task=1))
    engine.add_request(request("r2", [3] * 5, task=2))
    answers = {"r1": Answer(), "r2": Answer()}
    while not answers["r1"].final:
        for output in engine.step():
            answers[output.request_id].add(output)
        engine.check_integrity()
    assert answers["r2"].token_ids == []
    may_write.set()
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id].add(output)
    assert len(answers["r2"].token_ids) == 8
    engine.close()


def test_a_clock_that_is_set_changes_no_duration(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time stands still but for what the test lets pass, while the wall clock is set to anything."""
    monotonic_ns, wall_ns = itertools.count(10**9, 10**9), itertools.cycle([10**18, 2 * 10**18, 3 * 10**17])
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic_ns", lambda: next(monotonic_ns))
        patch.setattr(time, "time_ns", lambda: next(wall_ns))
        final = run_all(engine, [request("r", [1, 2, 3], max_tokens=4)])["r"].final
    assert final is not None
    assert final.perf is not None
    times = [final.perf.first_scheduled_time_ns, final.perf.first_token_time_ns, final.perf.last_token_time_ns]
    waited_s = [(time_ns - final.perf.arrival_time_ns) / 10**9 for time_ns in times]
    assert waited_s == sorted(waited_s)
    assert 0 < waited_s[0] < waited_s[-1] < 100


def test_jumps_of_the_clock_end_no_request_and_change_no_answer(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [request(f"r{i}", [1 + i, 2, 3], task=i) for i in range(3)]
    expected = run_all(engine, requests)
    jumps = itertools.cycle([0, 86_400, -86_400, 10_000_000])
    now, now_ns = time.time, time.time_ns
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now() + next(jumps))
        patch.setattr(time, "time_ns", lambda: now_ns() + next(jumps) * 10**9)
        answers = run_all(engine, requests)
    for name, answer in answers.items():
        assert answer.token_ids == expected[name].token_ids
        assert answer.final is not None
        assert answer.final.finish_reason == "length"
