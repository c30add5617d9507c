"""Outputs that wait are joined, and nothing of them is lost."""

from __future__ import annotations

import msgspec

from multilora_engine.process.messages import Outbox, join_outputs
from multilora_engine.request import PerfMetrics, TokenLogProb, TokenOutput

_PERF = PerfMetrics(arrival_time_ns=1)


def output(request_id: str, token_id: int, is_last: bool = False) -> TokenOutput:
    return TokenOutput(
        request_id,
        [token_id],
        f"<{token_id}>",
        finish_reason="stop" if is_last else None,
        num_prompt_tokens=3,
        num_output_tokens=token_id,
        log_probs=[TokenLogProb(-token_id)],
        generation_logits=bytes([token_id]),
        prompt_log_probs=b"p" if token_id == 1 else b"",
        num_cached_tokens=16,
        cum_log_prob=-token_id * 10,
        perf=_PERF if is_last else None,
    )


def test_the_outputs_of_a_request_become_one_with_all_tokens_and_the_last_totals() -> None:
    (joined,) = join_outputs([output("a", 1), output("a", 2), output("a", 3, is_last=True)])
    assert joined == TokenOutput(
        "a",
        [1, 2, 3],
        "<1><2><3>",
        finish_reason="stop",
        num_prompt_tokens=3,
        num_output_tokens=3,
        log_probs=[TokenLogProb(-1), TokenLogProb(-2), TokenLogProb(-3)],
        generation_logits=bytes([1, 2, 3]),
        prompt_log_probs=b"p",
        num_cached_tokens=16,
        cum_log_prob=-30,
        perf=_PERF,
    )


def test_an_error_does_not_take_the_tokens_before_it_along() -> None:
    failed = TokenOutput("a", [], "", error_code="INTERNAL")
    assert join_outputs([output("a", 1), output("b", 1), output("a", 2), failed]) == [
        *join_outputs([output("a", 1), output("a", 2)]),
        output("b", 1),
        failed,
    ]


def test_the_logits_of_prompts_are_not_joined_and_come_before_the_tokens() -> None:
    parts = [TokenOutput("a", [], "", context_logits=bytes([number])) for number in range(2)]
    tokens = [output("a", 1), output("a", 2)]
    first = msgspec.structs.replace(tokens[0], context_logits=b"2")
    assert join_outputs([*parts, output("b", 1), first]) == [*parts, output("b", 1), first]
    assert join_outputs([*parts, *tokens]) == [*parts, *join_outputs(tokens)]


def test_what_waits_for_one_front_is_its_own_and_goes_once() -> None:
    outbox = Outbox()
    assert not outbox
    for front, item in ((b"x", output("a", 1)), (b"y", output("c", 1)), (b"x", output("b", 1)), (b"x", output("a", 2))):
        outbox.add(front, item)
    assert outbox.fronts == [b"x", b"y"]
    assert outbox.take(b"x") == join_outputs([output("a", 1), output("b", 1), output("a", 2)])
    assert outbox.fronts == [b"y"]
    assert outbox.take(b"y") == [output("c", 1)]
    assert outbox.take(b"unknown") == []
    assert not outbox
