"""`FairQueue`: the sequences that wait, in an order that is fair between adapters."""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator

from multilora_engine.request import Sequence, SequenceStatus


class _Share:
    """What one adapter, or the base model, gets of one priority.

    num_tokens: its count, see `FairQueue`. waiting: in the order in which they start. num_sequences: that wait or run.
    """

    def __init__(self, lora_task_id: int | None) -> None:
        self.lora_task_id = lora_task_id
        self.num_tokens = 0
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()
        self.num_sequences = 0
        self.is_listed = False

    @property
    def first(self) -> Sequence:
        return next(iter(self.waiting))


class _Priority:
    """The shares of one priority.

    Listed are the shares with something waiting, as heap entries (count, arrival of a sequence, share). An entry whose
    count has grown since, or that has nothing waiting any more, is put right when it comes to the top.
    """

    def __init__(self) -> None:
        self.shares: dict[int | None, _Share] = {}
        self._heap: list[tuple[int, int, _Share]] = []
        self._smallest_count = 0

    def first(self) -> _Share | None:
        """The listed share with the smallest count."""
        while self._heap:
            num_tokens, arrival, share = self._heap[0]
            if not share.waiting:
                self._pop()
            elif num_tokens < share.num_tokens:
                heapq.heapreplace(self._heap, (share.num_tokens, arrival, share))
            else:
                self._smallest_count = num_tokens
                return share
        return None

    def list(self, share: _Share) -> None:
        """Let a share take part that has something waiting, from the smallest count of those that do on."""
        if not share.is_listed:
            self.first()
            share.num_tokens = max(share.num_tokens, self._smallest_count)
            self.restore(share)

    def set_aside(self, share: _Share) -> None:
        """Unlist the `first` share."""
        assert share is self._heap[0][2]
        self._pop()

    def restore(self, share: _Share) -> None:
        """List a share with the count that it has."""
        heapq.heappush(self._heap, (share.num_tokens, share.first.arrival, share))
        share.is_listed = True

    def drop(self, share: _Share) -> None:
        """Forget a share without sequences."""
        if share.num_sequences == 0 and not share.is_listed:
            del self.shares[share.lora_task_id]

    def check_integrity(self) -> None:
        listed = [share for _, _, share in self._heap]
        assert set(listed) == {share for share in self.shares.values() if share.is_listed}, "a share is lost"
        assert len(listed) == len(set(listed)), "a share is listed twice"
        assert all(num_tokens <= share.num_tokens for num_tokens, _, share in self._heap)
        assert all(share.is_listed for share in self.shares.values() if share.waiting), "nobody will look at a share"
        assert all(share.is_listed or share.num_sequences for share in self.shares.values()), "a share is left behind"

    def _pop(self) -> None:
        _, _, share = heapq.heappop(self._heap)
        share.is_listed = False
        self.drop(share)


class FairQueue:
    """Who starts next: the smallest priority; of that the adapter that was served least; of that who came first.

    Each adapter (and the base model) counts the tokens that were computed for it, in each priority on its own. When
    nothing of it has waited for a while, its count is lifted to the smallest of those that wait: nobody saves up. So an
    adapter with a thousand requests and one with a single request take turns. This is the virtual token counter of
    Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024: while two adapters have requests waiting,
    what they were served differs by no more than what can run at once.

    A sequence is `add`ed, taken to run (`take`), perhaps `put_back`, and at its end, waiting or running, `discard`ed.
    Each of these costs the logarithm of the number of adapters, however many sequences wait.
    """

    def __init__(self) -> None:
        self._priorities: dict[int, _Priority] = {}
        self._order: list[int] = []
        self._set_aside: list[tuple[_Priority, _Share]] = []
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        """All that wait, in no particular order."""
        for priority in self._priorities.values():
            for share in priority.shares.values():
                yield from share.waiting

    def add(self, sequence: Sequence) -> None:
        """A new sequence, behind all of its adapter."""
        number, lora_task_id = sequence.request.priority, sequence.request.lora_task_id
        if number not in self._priorities:
            self._priorities[number] = _Priority()
            insort(self._order, number)
        priority = self._priorities[number]
        share = priority.shares.setdefault(lora_task_id, _Share(lora_task_id))
        share.num_sequences += 1
        self._wait(sequence, priority, share)

    def put_back(self, sequence: Sequence) -> None:
        """A sequence that was taken, before all of its adapter; of several the one that came last goes back first."""
        priority, share = self._share(sequence)
        self._wait(sequence, priority, share)
        share.waiting.move_to_end(sequence, last=False)

    def first(self) -> Sequence | None:
        """Who should start next."""
        for number in self._order:
            share = self._priorities[number].first()
            if share is not None:
                return share.first
        return None

    def take(self, sequence: Sequence) -> None:
        """The sequence starts to run."""
        _, share = self._share(sequence)
        del share.waiting[sequence]
        self._num_waiting -= 1

    def set_aside(self, sequence: Sequence) -> None:
        """The `first` sequence cannot start now, nor those of its adapter behind it: pass over them until `restore`."""
        priority, share = self._share(sequence)
        priority.set_aside(share)
        self._set_aside.append((priority, share))

    def restore(self) -> None:
        for priority, share in self._set_aside:
            priority.restore(share)
        self._set_aside.clear()

    def charge(self, sequence: Sequence, start: int, end: int) -> None:
        """The tokens start .. end - 1 are computed for a sequence. What it lost and computes again is free."""
        _, share = self._share(sequence)
        share.num_tokens += max(0, end - max(start, sequence.num_charged_tokens))
        sequence.num_charged_tokens = max(end, sequence.num_charged_tokens)

    def discard(self, sequence: Sequence) -> None:
        """A sequence has ended, waiting or running."""
        priority, share = self._share(sequence)
        if sequence in share.waiting:
            self.take(sequence)
        share.num_sequences -= 1
        priority.drop(share)
        if priority.first() is None and not priority.shares:
            number = sequence.request.priority
            del self._priorities[number]
            self._order.remove(number)

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Every share counts what is its own. running: the sequences that were taken."""
        num_running = Counter((s.request.priority, s.request.lora_task_id) for s in running)
        assert self._order == sorted(self._priorities)
        assert not self._set_aside
        num_waiting = 0
        for number, priority in self._priorities.items():
            priority.check_integrity()
            for lora_task_id, share in priority.shares.items():
                assert share.num_sequences == len(share.waiting) + num_running.pop((number, lora_task_id), 0)
                assert all(s.status is SequenceStatus.WAITING and not s.block_table for s in share.waiting)
                num_waiting += len(share.waiting)
        assert not num_running, "a running sequence has no share"
        assert num_waiting == self._num_waiting

    def _share(self, sequence: Sequence) -> tuple[_Priority, _Share]:
        priority = self._priorities[sequence.request.priority]
        return priority, priority.shares[sequence.request.lora_task_id]

    def _wait(self, sequence: Sequence, priority: _Priority, share: _Share) -> None:
        share.waiting[sequence] = None
        self._num_waiting += 1
        priority.list(share)
