"""What one request's work on the host raises is that request's: at every point where a step does such work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.adapters import wire_adapter
from support.engines import Answer, assert_idle, run_all

from checkpoints.tiny_llama import save_tiny_llama
from multilora_engine.config import EngineConfig
from multilora_engine.engine import answers, engine
from multilora_engine.engine.accounts import Accounts
from multilora_engine.engine.answers import Answers
from multilora_engine.engine.engine import Engine
from multilora_engine.engine.guide_queue import GuideQueue
from multilora_engine.engine.scheduler import Scheduler
from multilora_engine.guides.guided import GuideMatcher
from multilora_engine.lora.format import pack_adapter
from multilora_engine.request import GenerationRequest, Guide, SamplingParams
from multilora_engine.sampling import logits, sampler
from multilora_engine.sampling.token_counts import TokenCounts
from multilora_engine.sequences.beam_search import BeamSearch
from multilora_engine.sequences.prompt_log_probs import PromptLogProbs
from multilora_engine.sequences.sequence import HeldOutputs, PromptReport, Sequence
from multilora_engine.sequences.token_history import TokenHistory
from multilora_engine.text.text_stream import TextStream

VICTIM = "victim"


class Injected(Exception):
    """Stands for any fault of ours."""


@dataclass(frozen=True)
class Point:
    """A place where a step works for one sequence. options: of a request that comes there. modes: of the engines in
    which it does."""

    owner: Any
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    modes: tuple[str, ...] = ("waiting", "ahead")

    def __str__(self) -> str:
        return f"{self.owner.__name__.rpartition('.')[2]}.{self.name}"


BEAMS = {"beam_width": 3, "length_penalty": 1.0}
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.4}
WORDS = {"bad_token_sequences": ((5,), (7, 8), (9, 10, 11))}
PROMPT = {"return_prompt_log_probs": True, "num_prompt_top_log_probs": 2}

POINTS = [
    Point(logits, "_repeated", PENALTIES, ("waiting",)),
    Point(logits, "_answered", PENALTIES, ("waiting",)),
    Point(logits, "_forbidden", WORDS, ("waiting",)),
    Point(logits, "_history", WORDS),
    Point(logits, "_history", PENALTIES | BEAMS),
    Point(logits, "_forbidden", WORDS | BEAMS),
    Point(logits, "_bans", WORDS, ("ahead",)),
    Point(logits, "_allowed", {"guide": Guide("regex", "[a-z ]{3,40}")}),
    Point(TokenCounts, "place_of", PENALTIES, ("ahead",)),
    Point(TokenHistory, "extend", WORDS),
    Point(sampler, "_rule", {"temperature": 0.8, "top_k": 0, "seed": 3}),
    Point(sampler, "_top_p", {"top_p": 0.9, "top_p_decay": 0.9, "top_k": 0, "seed": 3}),
    Point(GuideMatcher, "advance", {"guide": Guide("regex", "[a-z ]{3,40}")}),
    Point(TextStream, "push"),
    Point(TextStream, "push", BEAMS),
    Point(TextStream, "fork", BEAMS),
    Point(TextStream, "finish"),
    Point(TextStream, "finish", BEAMS),
    Point(answers, "end_tokens"),
    Point(answers, "token_output"),
    Point(answers, "beams_output", BEAMS),
    Point(answers, "continue_beams", BEAMS),
    Point(BeamSearch, "advance", BEAMS),
    Point(BeamSearch, "answers", BEAMS),
    Point(Scheduler, "branch", BEAMS),
    Point(Accounts, "charge_host_work", BEAMS),
    Point(Accounts, "charge_host_work", {"stop_words": ("zzzz",)}),
    Point(HeldOutputs, "release_log_probs", {"return_log_probs": True}),
    Point(HeldOutputs, "release_logits", {"return_generation_logits": True}),
    Point(PromptReport, "append_logits", {"return_context_logits": True}),
    Point(PromptReport, "release_logits", {"return_context_logits": True}),
    Point(PromptReport, "release_log_probs", PROMPT),
    Point(PromptLogProbs, "append", PROMPT),
    Point(PromptLogProbs, "to_bytes", PROMPT),
    Point(engine, "prompt_output", {"return_context_logits": True}),
]
CANCELLING = [
    Point(TextStream, "finish"),
    Point(answers, "token_output"),
    Point(BeamSearch, "answers", BEAMS),
    Point(TextStream, "finish", BEAMS),
    Point(answers, "beams_output", BEAMS),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engines(checkpoint: Path, default_model_dir: Path) -> dict[str, Engine]:
    def make(runs_ahead: bool) -> Engine:
        config = EngineConfig(
            model_path=checkpoint,
            tokenizer_path=default_model_dir,
            num_threads=1,
            kv_cache_memory_bytes=2 << 20,  # type: ignore[arg-type]
            max_num_seqs=16,
            max_num_batched_tokens=24,
            enable_async_scheduling=runs_ahead,
        )
        made = Engine(config)
        layout = made.info.adapter_layout
        for task in range(2):
            wire = wire_adapter(layout, [(1, 0, 4), (6, 1, 2 + task)], seed=task, scale=0.5)
            made.put_adapter(task, pack_adapter(wire.weights, wire.config, layout))
        return made

    return {"waiting": make(False), "ahead": make(True)}


def request(name: str, prompt: list[int], task: int | None = None, **options: Any) -> GenerationRequest:
    return GenerationRequest(name, prompt, SamplingParams(**{"max_tokens": 9, "end_id": -1} | options), task)


NEIGHBOURS = [
    request("greedy", [4, 5, 6], 0, return_log_probs=True),
    request("drawn", [7] * 30, 1, temperature=0.9, top_k=0, seed=5, repetition_penalty=1.2, return_log_probs=True),
    request("words", [8, 9], None, bad_token_sequences=((3,), (8, 9)), min_tokens=4, return_prompt_log_probs=True),
    request("beams", [10, 11], 1, beam_width=2),
]


@pytest.fixture(scope="module")
def alone(engines: dict[str, Engine]) -> dict[str, dict[str, tuple[object, ...]]]:
    """What each neighbour is told in each mode when nobody else is there."""
    return {
        mode: {one.request_id: told(run_all(served, [one])[one.request_id]) for one in NEIGHBOURS}
        for mode, served in engines.items()
    }


class Fault:
    """Raises, where it is put in the place of a function, in the victim's n-th call and all later ones."""

    def __init__(self, served: Engine, nth: int) -> None:
        self.num_raised = 0
        self._served = served
        self._left = nth
        self._is_victims_turn = False

    def raising(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if self._is_victims_turn or any(map(self._is_victims, args)):
                self._left -= 1
                if self._left <= 0:
                    self.num_raised += 1
                    raise Injected("of ours\n" * 1000)
            return work(*args, **options)

        return call

    def in_turn(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """`work` of `Answers`, in which everything is done for one sequence."""

        def call(of: Answers, sequence: Sequence, *args: Any) -> Any:
            self._is_victims_turn = sequence.request.request_id == VICTIM
            try:
                return work(of, sequence, *args)
            finally:
                self._is_victims_turn = False

        return call

    def _is_victims(self, value: object) -> bool:
        victim = self._served._live.get(VICTIM)
        if victim is None:
            return False
        report = victim.prompt_report
        parts = [*victim.beams, *(beam.history for beam in victim.beams), report, report.log_probs]
        return value is not None and any(value is part for part in parts)


def inject(monkeypatch: pytest.MonkeyPatch, served: Engine, point: Point, nth: int = 1) -> Fault:
    fault = Fault(served, nth)
    for name in ("extend", "extend_charged", "cancel"):
        monkeypatch.setattr(Answers, name, fault.in_turn(getattr(Answers, name)))
    monkeypatch.setattr(point.owner, point.name, fault.raising(getattr(point.owner, point.name)))
    return fault


def told(answer: Answer) -> tuple[object, ...]:
    assert answer.final is not None
    beams = [(beam.token_ids, beam.cum_log_prob) for beam in answer.final.beams]
    return answer.final.error_code, answer.token_ids, answer.text, answer.log_probs, answer.prompt_log_probs, beams


def serve(served: Engine, requests: list[GenerationRequest]) -> dict[str, Answer]:
    """One after the other, two steps apart: some are running when others come."""
    outcome = {one.request_id: Answer() for one in requests}
    waiting = list(requests)
    while waiting or served.has_work:
        if waiting:
            served.add_request(waiting.pop(0))
        for _ in range(2):
            for output in served.step():
                outcome[output.request_id].add(output)
            served.check_integrity()
    assert_idle(served)
    return outcome


@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize(
    ("mode", "point"), [(mode, point) for point in POINTS for mode in point.modes], ids=lambda value: str(value)
)
def test_a_fault_in_the_work_for_one_request_ends_that_one_and_changes_no_bit_of_the_others(
    engines: dict[str, Engine],
    alone: dict[str, dict[str, tuple[object, ...]]],
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    point: Point,
    nth: int,
) -> None:
    served = engines[mode]
    victim = request(VICTIM, [1, 2] * 25, 0, **point.options)
    with monkeypatch.context() as patch:
        fault = inject(patch, served, point, nth)
        outcome = serve(served, [*NEIGHBOURS[:2], victim, *NEIGHBOURS[2:]])
    final = outcome.pop(VICTIM).final
    assert final is not None
    if nth == 1:
        assert fault.num_raised, "nothing came to this point"
    if fault.num_raised:
        assert final.error_code == "INTERNAL"
        assert final.error_message is not None
        assert "Injected: of ours" in final.error_message
        assert len(final.error_message) < 400
    assert {name: told(answer) for name, answer in outcome.items()} == alone[mode]
    assert told(run_all(served, [victim])[VICTIM])[0] is None, "the engine is none the worse"


@pytest.mark.parametrize("mode", ["waiting", "ahead"])
@pytest.mark.parametrize("point", CANCELLING, ids=str)
def test_an_abort_never_raises(
    engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch, mode: str, point: Point
) -> None:
    served = engines[mode]
    served.add_request(request(VICTIM, [1, 2, 3], 0, **point.options))
    for _ in range(4):
        served.step()
    with monkeypatch.context() as patch:
        fault = inject(patch, served, point)
        final = served.abort(VICTIM)
    assert fault.num_raised
    assert final is not None
    assert final.error_code == "INTERNAL"
    while served.has_work:
        assert served.step() == []
        served.check_integrity()
    assert_idle(served)


def test_a_fault_while_a_request_is_taken_in_leaves_nothing_of_it(
    engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(*_: object) -> None:
        raise Injected

    served = engines["waiting"]
    with monkeypatch.context() as patch:
        patch.setattr(GuideQueue, "add", add)
        with pytest.raises(Injected):
            served.add_request(request(VICTIM, [1, 2, 3], 0, guide=Guide("json")))
    served.check_integrity()
    assert_idle(served)
    assert not served.has_work
