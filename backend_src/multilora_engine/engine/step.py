"""`Step`: the sequences scheduled to be computed together, and `work_of`, the amount of their work."""

from __future__ import annotations

import msgspec

from multilora_engine.engine.pace import PromptTime
from multilora_engine.engine.sequence import Sequence
from multilora_engine.engine.step_cost import StepWork, num_keys


class ScheduledSequence(msgspec.Struct, frozen=True):
    """`num_tokens` tokens of `sequence`, from `num_computed_tokens` (as it was when scheduled) on.

    is_sampled: the step computes its last token, so the logits give the next one.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    is_sampled: bool

    @property
    def is_decode(self) -> bool:
        """Whether it is one token of the answer. The attention of all others is that of prompts: an answer has the same
        bits however its prompt is cut, into pieces of one token, too.
        """
        return self.num_tokens == 1 and self.start >= len(self.sequence.request.prompt_token_ids)

    @property
    def context_positions(self) -> range:
        """The prompt's tokens in this step whose logits the request wants and has not got before a preemption."""
        sequence = self.sequence
        if not sequence.request.sampling.return_context_logits or sequence.output_token_ids:
            return range(0)
        return range(max(self.start, sequence.prompt_report.num_logits), self.start + self.num_tokens)

    @property
    def scored_positions(self) -> range:
        """The prompt's tokens in this step behind which are tokens whose log-probs are wanted and not known yet."""
        log_probs = self.sequence.prompt_report.log_probs
        return range(0) if log_probs is None else log_probs.missing(self.start, self.start + self.num_tokens)

    @property
    def token_ids(self) -> list[int]:
        """A pending token is missing."""
        return self.sequence.token_ids(self.start, self.start + self.num_tokens)


class Step:
    """A step in the making: the scheduled sequences, and how many tokens of the budget are left.

    prompt_time: for the tokens of prompts among these.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.prompt_time = PromptTime()
        self._scheduled: dict[Sequence, ScheduledSequence] = {}

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._scheduled

    @property
    def sequences(self) -> list[ScheduledSequence]:
        return list(self._scheduled.values())

    def room_for(self, sequence: Sequence) -> int:
        """How many tokens of its prompt a sequence may compute."""
        return self.prompt_time.room_for(sequence, self.budget)

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        start = sequence.num_computed_tokens
        is_sampled = start + num_tokens == sequence.num_tokens
        self._scheduled[sequence] = ScheduledSequence(sequence, start, num_tokens, is_sampled)
        self.budget -= num_tokens

    def remove(self, sequence: Sequence) -> None:
        for beam in sequence.beams:
            scheduled = self._scheduled.pop(beam, None)
            if scheduled is not None:
                self.budget += scheduled.num_tokens


def work_of(step: list[ScheduledSequence]) -> StepWork:
    """The work of a step. One last token of a prompt counts as a decode: it costs as much."""
    prompts = [scheduled for scheduled in step if scheduled.num_tokens > 1]
    return StepWork(
        num_decodes=len(step) - len(prompts),
        num_beams=sum(scheduled.sequence.search is not None for scheduled in step),
        has_prompts=int(bool(prompts)),
        num_prompt_tokens=sum(scheduled.num_tokens for scheduled in prompts),
        num_prompt_rows=sum(len(s.context_positions) + len(s.scored_positions) for s in prompts),
        num_decode_keys=sum(s.start + 1 for s in step if s.num_tokens == 1),
        num_prompt_keys=sum(num_keys(s.start, s.num_tokens) for s in prompts),
    )
