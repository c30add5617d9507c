"""Values that go to a client beside tokens and text, until they leave: `HeldOutputs` of its answer, `PromptReport`."""

from __future__ import annotations

from dataclasses import dataclass, field

from multilora_engine.request import TokenLogProb
from multilora_engine.sampling.prompt_log_probs import PromptLogProbs


@dataclass(slots=True)
class HeldOutputs:
    """Values of an answer's tokens that have not left yet; each list is empty in a request that did not ask for it.

    logits: rows of float32. cum_log_prob: the sum of the log-probs of the tokens that have left. Written by `Answers`
    and, for beams, by `continue_beams`.
    """

    log_probs: list[TokenLogProb] = field(default_factory=list)
    logits: list[bytes] = field(default_factory=list)
    cum_log_prob: float = 0.0

    def release_log_probs(self, num_tokens: int) -> list[TokenLogProb]:
        """The log-probs of the next `num_tokens` tokens that leave."""
        if not self.log_probs:
            return []
        released, self.log_probs = self.log_probs[:num_tokens], self.log_probs[num_tokens:]
        self.cum_log_prob += sum(token.log_prob for token in released)
        return released

    def release_logits(self, num_tokens: int) -> bytes:
        """The logits of the next `num_tokens` tokens that leave."""
        if not self.logits:
            return b""
        released, self.logits = self.logits[:num_tokens], self.logits[num_tokens:]
        return b"".join(released)


@dataclass(slots=True)
class PromptReport:
    """Values of a prompt's first tokens, as far as they are computed. Written by the model runner.

    logits: rows of float32 that have not left. num_logits: rows so far, with the rows that have left. log_probs: until
    they leave; None after that, and for a request that did not ask for them.
    """

    logits: list[bytes] = field(default_factory=list)
    num_logits: int = 0
    log_probs: PromptLogProbs | None = None

    def append_logits(self, rows: bytes, num_rows: int) -> None:
        """The logits of the prompt's next tokens."""
        self.logits.append(rows)
        self.num_logits += num_rows

    def release_logits(self) -> bytes:
        """The logits that have come since this was called last."""
        if not self.logits:
            return b""
        released, self.logits = self.logits, []
        return b"".join(released)

    def release_log_probs(self) -> bytes:
        """The log-probs of the whole prompt, once, as soon as all are known."""
        if self.log_probs is None or not self.log_probs.is_complete:
            return b""
        released, self.log_probs = self.log_probs.to_bytes(), None
        return released
