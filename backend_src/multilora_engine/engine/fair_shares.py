"""Which running sequence gives way to a client that has less than its share of the server."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from multilora_engine.sequences.sequence import Sequence


def choose_victim(
    newcomer: Sequence, needed: float, running: list[Sequence], held: Callable[[Sequence], float]
) -> Sequence | None:
    """The sequence that started last among those of clients above their shares; None where no sequence has to go.

    The shares are those of the clients that run and of the newcomer's, by their weights. A newcomer whose client would
    hold more than its own share, or is less urgent, waits like everybody.

    needed: part of the server that the newcomer takes. held: the part that a running sequence has. running: in the
    order in which they are preempted, from the end.
    """
    own = newcomer.request.sender
    parts: defaultdict[str, float] = defaultdict(float)
    weights = {own.account: own.weight}
    for sequence in running:
        sender = sequence.request.sender
        parts[sender.account] += held(sequence)
        weights[sender.account] = sender.weight
    total = sum(weights.values())
    if parts[own.account] + needed > weights[own.account] / total:
        return None
    for sequence in reversed(running):
        name = sequence.request.sender.account
        is_over = name != own.account and parts[name] > weights[name] / total
        if is_over and sequence.request.priority >= newcomer.request.priority:
            return sequence
    return None
