"""`FairQueue`: the sequences that wait, in an order that is fair between clients, and between the adapters of each."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from bisect import insort
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

from multilora_engine.engine.waiting_line import WaitingLine
from multilora_engine.lora.names import TaskId
from multilora_engine.sequences.sequence import Sequence, SequenceStatus

Key = TypeVar("Key", bound=Hashable)
AnyShare = TypeVar("AnyShare", bound="_Share")


class _Share(ABC):
    """The share that a client, or one of its adapters, has of one priority.

    num_tokens: its count, see `FairQueue`. num_sequences: that wait or run.
    """

    def __init__(self) -> None:
        self.num_tokens = 0.0
        self.num_sequences = 0
        self.is_listed = False

    @property
    @abstractmethod
    def first(self) -> Sequence | None:
        """The sequence that should start next; None if nothing waits, or all of it is set aside."""


class _AdapterShare(_Share):
    """The share of one adapter, or of the base model."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = WaitingLine()

    @property
    def first(self) -> Sequence | None:
        return self.waiting.first


class _Turns(Generic[Key, AnyShare]):
    """Shares that take turns.

    Listed are the shares with something waiting, as heap entries (count, arrival of a sequence, key). An entry whose
    count has grown since, or that has nothing waiting any more, is put right when it comes to the top.
    """

    def __init__(self) -> None:
        self.shares: dict[Key, AnyShare] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._smallest_count = 0.0

    def first(self) -> AnyShare | None:
        """The listed share with the smallest count."""
        while self._heap:
            num_tokens, arrival, key = self._heap[0]
            share = self.shares[key]
            if share.first is None:
                self._unlist_first()
            elif num_tokens < share.num_tokens:
                heapq.heapreplace(self._heap, (share.num_tokens, arrival, key))
            else:
                self._smallest_count = num_tokens
                return share
        return None

    def list(self, key: Key) -> None:
        """Let a share with waiting sequences take part. Its count rises to the smallest count of the shares that take
        part.
        """
        share = self.shares[key]
        if not share.is_listed:
            self.first()
            share.num_tokens = max(share.num_tokens, self._smallest_count)
            self.restore(key)

    def set_aside(self, key: Key) -> None:
        """Unlist the `first` share."""
        assert key == self._heap[0][2]
        self._unlist_first()

    def restore(self, key: Key) -> None:
        """List a share that has something waiting with the count that it has, unless it is listed."""
        share = self.shares[key]
        if not share.is_listed and (first := share.first) is not None:
            heapq.heappush(self._heap, (share.num_tokens, first.arrival, key))
            share.is_listed = True

    def drop(self, key: Key) -> None:
        """Forget a share without sequences."""
        share = self.shares[key]
        if share.num_sequences == 0 and not share.is_listed:
            del self.shares[key]

    def check_integrity(self) -> None:
        assert all(share.is_listed for share in self.shares.values() if share.first), "nobody will look at a share"
        listed = [key for _, _, key in self._heap]
        assert set(listed) == {key for key, share in self.shares.items() if share.is_listed}, "a share is lost"
        assert len(listed) == len(set(listed)), "a share is listed twice"
        assert all(num_tokens <= self.shares[key].num_tokens for num_tokens, _, key in self._heap)
        assert all(share.is_listed or share.num_sequences for share in self.shares.values()), "a share is left behind"

    def _unlist_first(self) -> None:
        _, _, key = heapq.heappop(self._heap)
        self.shares[key].is_listed = False
        self.drop(key)


class _ClientShare(_Share):
    """The share of one client. adapters: the turns that its own adapters take."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters: _Turns[TaskId | None, _AdapterShare] = _Turns()

    @property
    def first(self) -> Sequence | None:
        share = self.adapters.first()
        return None if share is None else share.first


_Clients = _Turns[str, _ClientShare]
"""The clients of one priority."""


class FairQueue:
    """The order of starts: the smallest priority; of that the client that was served least; of its adapters the one
    that was served least; of that the first sequence in its `WaitingLine`. Prompts that run go on in the order of
    `turn`, so that those of one client are computed one after the other.

    Each client counts the tokens that were computed for it, over its weight, in each priority on its own; so does each
    of its adapters (and the base model), without weights. When nothing of it has waited for a while, its count is
    lifted to the smallest waiting one: nobody saves up. So a client, or an adapter, with a thousand requests and
    one with a single request take turns. This is the virtual token counter of Sheng et al., "Fairness in Serving Large
    Language Models", OSDI 2024: while two clients have requests waiting, their service differs by no more than the
    work that can run at once.

    A sequence is `add`ed, taken to run (`take`), perhaps `put_back`, and at its end, waiting or running, `discard`ed.
    Each of these costs the logarithm of the number of clients, of adapters and of sequences.
    """

    def __init__(self) -> None:
        self._priorities: dict[int, _Clients] = {}
        self._order: list[int] = []
        self._set_aside: list[Sequence] = []
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        """All waiting sequences, in no particular order."""
        for clients in self._priorities.values():
            for client in clients.shares.values():
                for adapter in client.adapters.shares.values():
                    yield from adapter.waiting

    def add(self, sequence: Sequence) -> None:
        """A new sequence."""
        priority, name, task_id = _place(sequence)
        if priority not in self._priorities:
            self._priorities[priority] = _Turns()
            insort(self._order, priority)
        client = self._priorities[priority].shares.setdefault(name, _ClientShare())
        adapter = client.adapters.shares.setdefault(task_id, _AdapterShare())
        client.num_sequences += 1
        adapter.num_sequences += 1
        adapter.waiting.add(sequence)
        self._wait(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Put a taken sequence back, before all others of its adapter. Of several, put the last arrival back first."""
        self._adapter(sequence).waiting.put_back(sequence)
        self._wait(sequence)

    def first(self) -> Sequence | None:
        """The sequence that should start next."""
        for priority in self._order:
            client = self._priorities[priority].first()
            if client is not None:
                return client.first
        return None

    def hurry(self, sequence: Sequence) -> None:
        """From now on, no later sequence of the same client and adapter passes a sequence."""
        line = self._adapter(sequence).waiting
        if sequence in line:
            line.hurry(sequence)

    def take(self, sequence: Sequence) -> None:
        """The sequence starts to run."""
        self._adapter(sequence).waiting.remove(sequence)
        self._num_waiting -= 1

    def set_aside(self, sequence: Sequence) -> None:
        """The `first` sequence cannot start now, nor those of its client and adapter behind it: pass over them until
        `restore`.
        """
        self._client(sequence).adapters.set_aside(sequence.request.task_id)
        self._set_aside.append(sequence)

    def restore(self) -> None:
        for sequence in self._set_aside:
            priority, name, task_id = _place(sequence)
            self._client(sequence).adapters.restore(task_id)
            self._priorities[priority].restore(name)
        self._set_aside.clear()

    def charge(self, sequence: Sequence, start: int, end: int) -> None:
        """The tokens start .. end - 1 are computed for a sequence. Tokens that it lost and computes again are free."""
        num_tokens = max(0, end - max(start, sequence.num_charged_tokens))
        self._client(sequence).num_tokens += num_tokens / sequence.request.sender.weight
        self._adapter(sequence).num_tokens += num_tokens
        sequence.num_charged_tokens = max(end, sequence.num_charged_tokens)

    def has_others(self, sequence: Sequence) -> bool:
        """Whether clients other than a sequence's have sequences that wait or run."""
        name = sequence.request.sender.account
        return any(clients.shares.keys() != {name} for clients in self._priorities.values())

    def turn(self, sequence: Sequence) -> tuple[int, float, float]:
        """Sorts sequences in the order in which their prompts are computed."""
        return sequence.request.priority, self._client(sequence).num_tokens, self._count_at_the_end(sequence)

    def goes_before(self, waiting: Sequence, running: Sequence) -> bool:
        """Whether the `first` sequence goes before a running one that is still in its prompt.

        Of one client and adapter, the sequence with fewer tokens to compute goes first, but a late one goes before all
        that are not late.
        """
        if _place(waiting) == _place(running):
            if waiting.is_late or running.is_late:
                return waiting.is_late and (not running.is_late or waiting.arrival < running.arrival)
            return waiting.num_missing_tokens < running.num_missing_tokens
        return self.turn(waiting) < self.turn(running)

    def follows_late(self, waiting: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether a late running sequence came before a waiting one of the same client and adapter."""
        place = _place(waiting)
        return any(one.is_late and one.arrival < waiting.arrival and _place(one) == place for one in running)

    def would_follow(self, running: Sequence, waiting: Sequence) -> bool:
        """Whether a sequence that runs, put back, would start after the `first` one, of another client."""
        if running.request.priority != waiting.request.priority:
            return running.request.priority > waiting.request.priority
        return self._client(running).num_tokens > self._client(waiting).num_tokens

    def discard(self, sequence: Sequence) -> None:
        """A sequence has ended, waiting or running."""
        priority, name, task_id = _place(sequence)
        client, adapter = self._client(sequence), self._adapter(sequence)
        if sequence in adapter.waiting:
            self.take(sequence)
        client.num_sequences -= 1
        adapter.num_sequences -= 1
        client.adapters.drop(task_id)
        clients = self._priorities[priority]
        clients.drop(name)
        if clients.first() is None and not clients.shares:
            del self._priorities[priority]
            self._order.remove(priority)

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Every share counts its own sequences. running: the sequences that were taken."""
        num_running = Counter(map(_place, running))
        assert self._order == sorted(self._priorities)
        assert not self._set_aside
        assert sum(1 for _ in self) == self._num_waiting
        assert all(s.status is SequenceStatus.WAITING and not s.block_table.length for s in self)
        for priority, clients in self._priorities.items():
            clients.check_integrity()
            for name, client in clients.shares.items():
                client.adapters.check_integrity()
                adapters = client.adapters.shares
                assert client.num_sequences == sum(adapter.num_sequences for adapter in adapters.values())
                for task_id, adapter in adapters.items():
                    adapter.waiting.check_integrity()
                    num_taken = num_running.pop((priority, name, task_id), 0)
                    assert adapter.num_sequences == len(adapter.waiting) + num_taken
        assert not num_running, "a running sequence has no share"

    def _client(self, sequence: Sequence) -> _ClientShare:
        return self._priorities[sequence.request.priority].shares[sequence.request.sender.account]

    def _adapter(self, sequence: Sequence) -> _AdapterShare:
        return self._client(sequence).adapters.shares[sequence.request.task_id]

    def _count_at_the_end(self, sequence: Sequence) -> float:
        """The count of a sequence's adapter when its prompt is computed, if the adapter computes nothing else. Unlike
        the count of now it does not grow with the prompt: else prompts of several adapters would take turns, and all
        come to their ends late.
        """
        return self._adapter(sequence).num_tokens + sequence.num_missing_tokens

    def _wait(self, sequence: Sequence) -> None:
        priority, name, task_id = _place(sequence)
        self._num_waiting += 1
        self._client(sequence).adapters.list(task_id)
        self._priorities[priority].list(name)


def _place(sequence: Sequence) -> tuple[int, str, TaskId | None]:
    """Priority, client and adapter of a sequence."""
    request = sequence.request
    return request.priority, request.sender.account, request.task_id
