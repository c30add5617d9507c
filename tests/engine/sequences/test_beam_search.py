"""Beam search through the whole engine, token for token against transformers' `generate(num_beams=...)`."""

from __future__ import annotations

import json
from itertools import cycle, product
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
import torch
from support.engines import Answer, assert_idle, run_all
from support.oracle import ATTENTION, MLP, Oracle, packed
from transformers import (
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)

from checkpoints.tiny_llama import VOCAB_SIZE, save_tiny_llama
from multilora_engine.config import EngineConfig
from multilora_engine.engine.engine import Engine
from multilora_engine.errors import InvalidRequest, RequestError, Unsupported
from multilora_engine.request import BeamOutput, GenerationRequest, Guide, SamplingParams
from multilora_engine.sequences.beam_search import BeamSearch, Continuations
from multilora_engine.sequences.sequence import Sequence
from multilora_engine.text.text_stream import TextStream
from multilora_engine.text.tokenizer import Tokenizer

ENDS = [*range(20, 60)]
"""So many end tokens that the answers of a random model end early, and some of every length compete."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_tiny_llama(tmp_path_factory.mktemp("tiny"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"eos_token_id": ENDS}))
    return path


@pytest.fixture(scope="module")
def oracle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    oracle = Oracle(LlamaForCausalLM.from_pretrained(checkpoint), tmp_path_factory.mktemp("adapters"))
    oracle.add_random("all", 8, ATTENTION + MLP, seed=1)
    oracle.add_random("some", 3, ["q_proj", "down_proj"], seed=2)
    return oracle


def make_engine(
    checkpoint: Path, oracle: Oracle, tokenizer: Path, kv_cache_memory_bytes: int = 1 << 20, **options: Any
) -> Engine:
    """By default with no more blocks than needed: every one is looked at after every step."""
    config = EngineConfig(
        model_path=checkpoint,
        tokenizer_path=tokenizer,
        num_threads=1,
        kv_cache_memory_bytes=kv_cache_memory_bytes,  # type: ignore[arg-type]
        **options,
    )
    engine = Engine(config)
    for task_id, directory in enumerate(oracle.adapters.values()):
        engine.put_adapter(task_id, packed(directory, engine.info.adapter_layout))
    return engine


@pytest.fixture(scope="module")
def engine(checkpoint: Path, oracle: Oracle, default_model_dir: Path) -> Engine:
    return make_engine(checkpoint, oracle, default_model_dir, block_size=4)


def search(name: str, prompt: list[int], task: int | None = None, **sampling: Any) -> GenerationRequest:
    parameters = {"max_tokens": 12, "beam_width": 4, "length_penalty": 1.0} | sampling
    return GenerationRequest(name, prompt, SamplingParams(**parameters), lora_task_id=task)


def beams_of(answer: Answer) -> list[BeamOutput]:
    assert answer.final is not None
    assert answer.final.error_code is None, answer.final.error_message
    assert answer.final.finish_reason == answer.final.beams[0].finish_reason
    return answer.final.beams


def expected_beams(
    oracle: Oracle, request: GenerationRequest, processors: tuple[Any, ...] = (), **options: Any
) -> list[tuple[list[int], float]]:
    """Tokens and scores of the beams that transformers finds, best first."""
    sampling, names = request.sampling, [*oracle.adapters]
    found = oracle.generate(
        None if request.lora_task_id is None else names[request.lora_task_id],
        request.prompt_token_ids,
        do_sample=False,
        num_beams=sampling.beam_width,
        num_return_sequences=sampling.beam_width,
        max_new_tokens=sampling.max_tokens,
        length_penalty=sampling.length_penalty,
        early_stopping={1: True, 0: False}.get(sampling.early_stopping, "never"),
        eos_token_id=ENDS,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        logits_processor=LogitsProcessorList(processors),
        **options,
    )
    answers = found.sequences[:, len(request.prompt_token_ids) :].tolist()
    return list(zip(map(without_padding, answers), found.sequences_scores.tolist(), strict=True))


def without_padding(answer: list[int]) -> list[int]:
    end = next((i for i, token_id in enumerate(answer) if token_id in ENDS), len(answer))
    return answer[: end + 1]


def assert_beams(request: GenerationRequest, answer: Answer, expected: list[tuple[list[int], float]]) -> None:
    beams = beams_of(answer)
    assert [beam.token_ids for beam in beams] == [token_ids for token_ids, _ in expected]
    for beam, (token_ids, score) in zip(beams, expected, strict=True):
        assert beam.finish_reason == ("stop" if token_ids[-1] in ENDS else "length")
        assert beam.cum_log_prob / len(token_ids) ** request.sampling.length_penalty == pytest.approx(score, abs=1e-3)
        assert len(beam.log_probs) == len(token_ids)
        assert sum(token.log_prob for token in beam.log_probs) == pytest.approx(beam.cum_log_prob, abs=1e-3)


def mixed_searches() -> list[GenerationRequest]:
    """Every rule with every adapter and none, of several widths, after prompts that end inside and between blocks."""
    rules = product([1, 0, 2], [0.0, 1.0, -0.5, 2.5])
    sizes = zip(cycle([2, 5, 3, 8, 4]), cycle([3, 8, 1, 14, 5, 7]), cycle([None, 0, 1]))
    return [
        search(
            f"r{i}",
            [(7 * i + j) % VOCAB_SIZE for j in range(length)],
            task,
            beam_width=width,
            early_stopping=early_stopping,
            length_penalty=penalty,
        )
        for i, ((early_stopping, penalty), (width, length, task)) in enumerate(zip(rules, sizes, strict=False))
    ]


def test_beams_are_those_of_transformers_in_any_batch(engine: Engine, oracle: Oracle) -> None:
    searches = mixed_searches()
    others = [
        GenerationRequest(f"o{i}", [i, 2, 3], SamplingParams(9, top_k=top_k, seed=i, end_id=-1), lora_task_id=task)
        for i, (top_k, task) in enumerate([(1, None), (0, 1), (0, 0)])
    ]
    alone = run_all(engine, others)
    answers = run_all(engine, [*searches[:4], others[0], *searches[4:], *others[1:]])
    lengths = set()
    for request in searches:
        expected = expected_beams(oracle, request)
        assert_beams(request, answers[request.request_id], expected)
        lengths |= {len(token_ids) for token_ids, _ in expected}
    assert len(lengths) > 4
    assert [answers[o.request_id].token_ids for o in others] == [alone[o.request_id].token_ids for o in others]


def test_beams_survive_preemption(engine: Engine, checkpoint: Path, oracle: Oracle, default_model_dir: Path) -> None:
    searches = [search(f"r{i}", [i + 1] * 21, [None, 0, 1][i % 3], max_tokens=20, end_id=-1) for i in range(1, 7)]
    tight = make_engine(
        checkpoint, oracle, default_model_dir, block_size=4, max_model_len=48, kv_cache_memory_bytes=48 * 1024
    )
    assert tight.info.kv_cache_tokens < 6 * 4 * 41
    roomy, crowded = run_all(engine, searches), run_all(tight, searches)
    assert tight.stats.num_preemptions > 0
    for request in searches:
        expected = [(beam.token_ids, beam.text) for beam in beams_of(roomy[request.request_id])]
        assert [(beam.token_ids, beam.text) for beam in beams_of(crowded[request.request_id])] == expected


class OnLogits(LogitsProcessor):
    """transformers hands its processors log-probs when it searches; this one lets them have the logits themselves."""

    def __init__(self, checkpoint: Path, processors: list[LogitsProcessor]) -> None:
        self._model = LlamaForCausalLM.from_pretrained(checkpoint)
        self._processors = LogitsProcessorList(processors)

    @torch.no_grad()
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        logits = self._model(input_ids).logits[:, -1]
        return self._processors(input_ids, logits).log_softmax(dim=-1)


@pytest.mark.parametrize(
    ("options", "processors"),
    [
        ({"temperature": 2.5, "top_k": 0}, lambda: [TemperatureLogitsWarper(2.5)]),
        ({"repetition_penalty": 1.8}, lambda: [RepetitionPenaltyLogitsProcessor(1.8)]),
        ({"min_tokens": 6}, lambda: [MinNewTokensLengthLogitsProcessor(3, 6, ENDS)]),
        (
            {"embedding_bias": ((40, 3.0), (100, -9.0)), "bad_token_sequences": ((137,), (2, 262))},
            lambda: [
                SequenceBiasLogitsProcessor([[[40], 3.0], [[100], -9.0]]),
                NoBadWordsLogitsProcessor([[137], [2, 262]]),
            ],
        ),
    ],
)
def test_beams_honour_what_changes_logits(
    engine: Engine, oracle: Oracle, checkpoint: Path, options: dict[str, Any], processors: Any
) -> None:
    request = search("r", [137, 89, 262], **options)
    answers = run_all(engine, [request, search("plain", request.prompt_token_ids)])
    assert_beams(request, answers["r"], expected_beams(oracle, request, (OnLogits(checkpoint, processors()),)))
    assert [b.token_ids for b in beams_of(answers["r"])] != [b.token_ids for b in beams_of(answers["plain"])]


class TextContains(StoppingCriteria):
    def __init__(self, tokenizer: Tokenizer, prompt: list[int], word: str) -> None:
        self._tokenizer, self._num_prompt, self._word = tokenizer, len(prompt), word

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        texts = [self._tokenizer.decode(row[self._num_prompt :]) for row in input_ids.tolist()]
        return torch.tensor([self._word in text for text in texts])


def test_a_stop_word_ends_a_beam_and_is_not_in_its_text(engine: Engine, oracle: Oracle) -> None:
    tokenizer = engine._tokenizer
    free = beams_of(run_all(engine, [search("r", [1, 2, 3])])["r"])
    word = free[0].text[3:5]
    request = search("r", [1, 2, 3], stop_words=(word,))
    criteria = StoppingCriteriaList([TextContains(tokenizer, request.prompt_token_ids, word)])
    expected = expected_beams(oracle, request, stopping_criteria=criteria)
    beams = beams_of(run_all(engine, [request])["r"])
    texts = [tokenizer.decode(token_id for token_id in token_ids if token_id not in ENDS) for token_ids, _ in expected]
    assert any(word in text for text in texts)
    assert [beam.text for beam in beams] == [text.partition(word)[0] for text in texts]
    assert all(beam.finish_reason == "stop" for beam, text in zip(beams, texts, strict=True) if word in text)


@pytest.mark.parametrize(
    ("word", "sequence"),
    [("<|im_start|>", (1,)), ("i<|im_start|>", (89, 1)), ("<|im_start|>i", (1, 89))],
)
@pytest.mark.parametrize("ends", [{}, {"end_id": -1}])
def test_a_stop_word_that_spells_special_tokens_ends_beams_as_its_ids_do(
    engine: Engine, word: str, sequence: tuple[int, ...], ends: dict[str, int]
) -> None:
    options: dict[str, Any] = {"embedding_bias": ((1, 8.0), (89, 8.0)), **ends}
    expected = beams_of(run_all(engine, [search("r", [1, 2, 3], stop_token_sequences=(sequence,), **options)])["r"])
    beams = beams_of(run_all(engine, [search("r", [1, 2, 3], stop_words=(word,), **options)])["r"])
    assert beams == expected
    assert any(beam.token_ids[-len(sequence) :] == [*sequence] for beam in beams)


def test_a_search_whose_beams_end_one_after_the_other_gives_what_there_is(engine: Engine) -> None:
    most = tuple((token_id,) for token_id in range(VOCAB_SIZE) if token_id % 50)
    beams = beams_of(run_all(engine, [search("r", [1, 2, 3], beam_width=8, stop_token_sequences=most)])["r"])
    assert 1 <= len(beams) <= 8
    assert len({tuple(beam.token_ids) for beam in beams}) == len(beams)


def test_an_aborted_search_gives_its_beams_as_they_are(engine: Engine) -> None:
    engine.add_request(search("r", [1, 2, 3], end_id=-1))
    for _ in range(5):
        engine.step()
        engine.check_integrity()
    output = engine.abort("r")
    assert output is not None
    assert (output.finish_reason, [len(beam.token_ids) for beam in output.beams]) == ("cancelled", [5] * 4)
    assert [beam.finish_reason for beam in output.beams] == ["cancelled"] * 4
    assert_idle(engine)


def test_diversity_prefers_the_children_of_less_likely_beams() -> None:
    def parents(rate: float) -> list[int]:
        sampling = SamplingParams(9, beam_width=2, beam_search_diversity_rate=rate)
        beams = [search("r", [1]) for _ in range(2)]
        ranked = [Continuations([5, 6], [-1.0, -1.2]), Continuations([7, 8], [-1.5, -1.6])]
        text = cast(TextStream, None)
        sequences = [Sequence(beam, 0, None, text, Random(0), 9) for beam in beams]
        return [c.parent for c in BeamSearch(sampling, (), 9, text).advance(sequences, ranked)]

    assert [parents(0.0), parents(0.4), parents(1.0)] == [[0, 0], [0, 1], [1, 1]]


@pytest.mark.parametrize("penalty", [2000.0, -2000.0, 3.4e38, -3.4e38])
@pytest.mark.parametrize("early_stopping", [1, 0, 2])
def test_no_length_penalty_is_too_large(engine: Engine, penalty: float, early_stopping: int) -> None:
    """With a large one answers are ordered by their lengths, of equal lengths by their log-probs."""
    one = search("r", [1, 2, 3], length_penalty=penalty, early_stopping=early_stopping)
    beams = beams_of(run_all(engine, [one])["r"])
    sign = 1 if penalty > 0 else -1
    ranks = [(sign * len(beam.token_ids), beam.cum_log_prob) for beam in beams]
    assert len(beams) == 4
    assert ranks == sorted(ranks, reverse=True)


@pytest.mark.parametrize("temperature", [1e-45, 1e-39, 1e-6])
def test_at_the_smallest_temperatures_a_search_finds_the_likeliest_tokens(engine: Engine, temperature: float) -> None:
    one = search("r", [1, 2, 3], temperature=temperature)
    greedy = GenerationRequest("g", [1, 2, 3], SamplingParams(12))
    answers = run_all(engine, [one, greedy])
    beams = beams_of(answers["r"])
    assert beams[0].token_ids == answers["g"].token_ids
    assert beams[0].cum_log_prob == 0.0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"beam_width": 9}, InvalidRequest, "beam_width is 9; a request may have 1 .. 8 beams"),
        ({"beam_width": 0}, InvalidRequest, "beam_width is 0; a request may have 1 .. 8 beams"),
        ({"length_penalty": float("nan")}, InvalidRequest, "len_penalty is nan, expected a number in"),
        ({"beam_search_diversity_rate": float("inf")}, InvalidRequest, "beam_search_diversity_rate is inf"),
        ({"temperature": 0.0}, InvalidRequest, "temperature is 0 with beam_width > 1"),
        ({"top_k": 5, "min_p": 0.1}, Unsupported, "beam_width 4 together with runtime_top_k and min_p"),
        ({"top_p": 0.5}, Unsupported, "beam_width 4 together with runtime_top_p"),
        ({"guide": Guide("json")}, Unsupported, "beam_width 4 together with guided decoding"),
        ({"num_top_log_probs": 2}, Unsupported, "beam_width 4 together with num_top_log_probs"),
    ],
)
def test_what_does_not_go_with_beams_is_refused(
    engine: Engine, options: dict[str, Any], error: type[RequestError], message: str
) -> None:
    with pytest.raises(error, match=message):
        engine.add_request(search("r", [1, 2, 3], **options))
    assert_idle(engine)


def test_beams_that_could_never_fit_are_refused(checkpoint: Path, oracle: Oracle, default_model_dir: Path) -> None:
    small = make_engine(
        checkpoint, oracle, default_model_dir, block_size=4, max_model_len=36, kv_cache_memory_bytes=32 << 10
    )
    with pytest.raises(
        InvalidRequest, match=r"4 beams of up to 36 tokens may need 36 blocks of the KV cache, which has 32"
    ):
        small.add_request(search("r", [1] * 20, max_tokens=100))
    everything = tuple((token_id,) for token_id in range(VOCAB_SIZE))
    answers = run_all(small, [search("dead", [1], bad_token_sequences=everything), search("alive", [1])])
    assert answers["dead"].final is not None
    assert answers["dead"].final.error_code == "INVALID_ARG"
    assert len(beams_of(answers["alive"])) == 4
