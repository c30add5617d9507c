"""`ScheduledSequence`: the part of a sequence that one step computes."""

from __future__ import annotations

import msgspec

from multilora_engine.sequences.sequence import Sequence


class ScheduledSequence(msgspec.Struct, frozen=True):
    """`num_tokens` tokens of `sequence`, from position `start` on.

    start: the sequence's `num_computed_tokens` when it was scheduled.
    is_sampled: whether the step computes the sequence's last token, so that the logits give the next token.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    is_sampled: bool

    @property
    def is_decode(self) -> bool:
        """Whether the part is one token of the answer. All other parts use the attention of prompts.

        So an answer has the same bits however its prompt was cut, even into pieces of one token.
        """
        return self.num_tokens == 1 and self.start >= len(self.sequence.request.prompt_token_ids)

    @property
    def num_base_tokens(self) -> int:
        """How many of these tokens, the first ones, the base computes although the sequence has an adapter."""
        return min(self.num_tokens, max(0, self.sequence.lora_start - self.start))

    @property
    def context_positions(self) -> range:
        """The prompt's tokens in this step whose logits the request wants and did not get before a preemption."""
        sequence = self.sequence
        if not sequence.request.sampling.return_context_logits or sequence.output_token_ids:
            return range(0)
        return range(max(self.start, sequence.prompt_report.num_logits), self.start + self.num_tokens)

    @property
    def scored_positions(self) -> range:
        """The prompt's positions in this step whose next token needs a log-prob that is not known yet."""
        log_probs = self.sequence.prompt_report.log_probs
        return range(0) if log_probs is None else log_probs.missing(self.start, self.start + self.num_tokens)

    @property
    def token_ids(self) -> list[int]:
        """The tokens of this part, without a pending token."""
        return self.sequence.token_ids(self.start, self.start + self.num_tokens)
