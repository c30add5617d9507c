"""`Outbox`: the outputs of the engine that its fronts have not taken yet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import chain

import msgspec

from multilora_engine.request import TokenOutput

MAX_QUEUED_MESSAGES = 16
"""Messages that ZeroMQ holds on either side for a front that does not read. When it holds that many, outputs wait here,
to be joined.
"""


class Outbox:
    """Outputs by front; never more than the answers of running requests."""

    def __init__(self) -> None:
        self._waiting: defaultdict[bytes, list[TokenOutput]] = defaultdict(list)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def fronts(self) -> list[bytes]:
        """The fronts that messages wait for."""
        return list(self._waiting)

    def add(self, front: bytes, output: TokenOutput) -> None:
        self._waiting[front].append(output)

    def take(self, front: bytes) -> list[TokenOutput]:
        """Take out the outputs that wait for a front, joined by `join_outputs`."""
        return join_outputs(self._waiting.pop(front, []))


def join_outputs(outputs: Iterable[TokenOutput]) -> list[TokenOutput]:
    """The same outputs, joined by request, so that a slow listener catches up.

    Errors stay apart, and logits of prompts, which are megabytes each.
    """
    grouped: defaultdict[tuple[str, bool, int], list[TokenOutput]] = defaultdict(list)
    for place, output in enumerate(outputs):
        apart = place if output.context_logits else -1
        grouped[output.request_id, output.error_code is not None, apart].append(output)
    return [group[0] if len(group) == 1 else _join(group) for group in grouped.values()]


def _join(outputs: list[TokenOutput]) -> TokenOutput:
    """The totals and the end come from the last output."""
    return msgspec.structs.replace(
        outputs[-1],
        token_ids=list(chain.from_iterable(output.token_ids for output in outputs)),
        text="".join(output.text for output in outputs),
        log_probs=list(chain.from_iterable(output.log_probs for output in outputs)),
        generation_logits=b"".join(output.generation_logits for output in outputs),
        prompt_log_probs=b"".join(output.prompt_log_probs for output in outputs),
    )
