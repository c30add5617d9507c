"""`Step`: the sequences scheduled to be computed together, and `work_of`, the amount of their work."""

from __future__ import annotations

from multilora_engine.engine.pace import PromptTime
from multilora_engine.engine.step_cost import StepWork, num_keys
from multilora_engine.sequences.scheduled_sequence import ScheduledSequence
from multilora_engine.sequences.sequence import Sequence


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
