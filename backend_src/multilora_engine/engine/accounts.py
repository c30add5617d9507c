"""`Accounts`: one account for each client, in seconds of the engine's thread. `FairQueue`: the order that it gives."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from multilora_engine.errors import TooMuchHostWork
from multilora_engine.lora.names import TaskId
from multilora_engine.request import SamplingParams, Sender
from multilora_engine.sequences.sequence import Sequence, SequenceStatus

TOKENS_OF_A_PLACE = 32
"""A waiting sequence lets one later sequence pass for each so many tokens."""

HOST_WORK_S = 0.05
"""The time in a step that words, guides and beams of all requests may take together."""

_MAX_DEBT = 5
"""A request may be behind by so many times that time."""

_MAX_CHARGE = 2
"""One step charges a request at most so many times that time."""


class Account:
    """What a client, or one of its adapters, has used of the engine's thread, in seconds.

    step_s: of steps and of the host's work, over the client's weight. Only the engine's thread writes it. guide_s: of
    compiling guides, likewise. Only the threads that compile guides write it. num_users: sequences in the engine, and
    guides that are compiled. parts: the accounts under this one. floor_s: the use of the part that went first lately. A
    new part starts there: nobody saves up.
    """

    __slots__ = ("floor_s", "guide_s", "num_users", "parts", "step_s", "weight")

    def __init__(self, step_s: float = 0.0) -> None:
        self.step_s = step_s
        self.guide_s = 0.0
        self.weight = 1.0
        self.num_users = 0
        self.parts: dict[Hashable, Account] = {}
        self.floor_s = 0.0

    @property
    def use_s(self) -> float:
        return self.step_s + self.guide_s

    def open(self, key: Hashable) -> Account:
        """The account of a part that has one more user."""
        part = self.parts.get(key)
        if part is None:
            part = self.parts[key] = Account(self.floor_s)
        part.num_users += 1
        return part

    def close(self, key: Hashable) -> None:
        """A part has one user less. An account without users is forgotten."""
        self.parts[key].num_users -= 1
        if not self.parts[key].num_users:
            del self.parts[key]


class Accounts:
    """The account of each client with sequences in the engine. Under it are those of its adapters and the base model.

    An account grows by the seconds of tokens in steps, of the host's work between steps, and of compiling guides, over
    the weight of the client. The queue, the guides and the places of the batch read this number. A client with a
    thousand requests and a client with one take turns by it.
    """

    def __init__(self) -> None:
        self.clients = Account()
        self._of_sequence: dict[Sequence, tuple[Account, Account]] = {}

    def open_client(self, sender: Sender) -> Account:
        """The account of a sender, until `close_client`."""
        client = self.clients.open(sender.account)
        client.weight = sender.weight
        return client

    def close_client(self, sender: Sender) -> None:
        self.clients.close(sender.account)

    def open(self, sequence: Sequence) -> None:
        """A sequence comes in."""
        client = self.open_client(sequence.request.sender)
        self._of_sequence[sequence] = client, client.open(sequence.request.task_id)

    def close(self, sequence: Sequence) -> None:
        """A sequence that came in has ended."""
        client, _ = self._of_sequence.pop(sequence)
        client.close(sequence.request.task_id)
        self.close_client(sequence.request.sender)

    def client(self, sequence: Sequence) -> Account:
        """The account of a sequence's client."""
        return self._of_sequence[sequence][0]

    def adapter(self, sequence: Sequence) -> Account:
        """The account of a sequence's adapter."""
        return self._of_sequence[sequence][1]

    def _of_beam(self, sequence: Sequence) -> tuple[Account, Account]:
        """The accounts of a further beam of a search."""
        client = self.clients.parts[sequence.request.sender.account]
        return client, client.parts[sequence.request.task_id]

    def has_others(self, sequence: Sequence) -> bool:
        """Whether clients other than a sequence's have sequences in the engine."""
        return self.clients.parts.keys() != {sequence.request.sender.account}

    def charge(self, sequence: Sequence, seconds: float) -> None:
        """A sequence takes so many seconds of the engine's thread."""
        client, adapter = self._of_sequence.get(sequence) or self._of_beam(sequence)
        client.step_s += seconds / client.weight
        adapter.step_s += seconds

    def over_their_shares(self, held: Iterable[tuple[Sequence, float]], whole: float) -> set[Account]:
        """The clients that hold more of a whole than their shares, which go by their weights.

        held: what each sequence has of it. Shares, not accounts, decide who gives way in a batch: by their accounts
        clients would change places again and again, and the running answers of a client far ahead would get no token.
        """
        parts: defaultdict[Account, float] = defaultdict(float)
        for sequence, part in held:
            parts[self._of_sequence[sequence][0]] += part
        total = sum(client.weight for client in parts)
        over = {client for client, part in parts.items() if part / whole > client.weight / total}
        return over if len(parts) > 1 else set()

    def charge_host_work(self, sequence: Sequence, seconds: float, num_sharing: int) -> None:
        """The words, guide or beams of a sequence took so many seconds between two steps.

        Raises TooMuchHostWork for a sequence that takes more than its part of `HOST_WORK_S` in step after step: an
        account only says who goes first, and such a sequence makes every step of all others long (the attack with as
        many words as allowed). All requests with such work share the time equally. A request's time beyond its part is
        its debt, and further steps pay the debt off. One step alone ends no request: the interpreter may have collected
        garbage in it. num_sharing: requests with such work in this step.
        """
        self.charge(sequence, seconds)
        charge_s = min(seconds, _MAX_CHARGE * HOST_WORK_S)
        sequence.host_debt_s = max(0.0, sequence.host_debt_s + charge_s - HOST_WORK_S / num_sharing)
        if sequence.host_debt_s > _MAX_DEBT * HOST_WORK_S:
            raise TooMuchHostWork(sequence.host_debt_s, HOST_WORK_S, num_sharing)


def has_host_work(sampling: SamplingParams) -> bool:
    """Whether tokens of a request may cost the host more than tokens of any other request."""
    has_words = bool(sampling.stop_words or sampling.stop_token_sequences)
    return has_words or sampling.guide is not None or sampling.beam_width > 1


class _Waiting(Protocol):
    """Sequences that wait under an account."""

    @property
    def account(self) -> Account: ...

    @property
    def first(self) -> Sequence | None: ...


Key = TypeVar("Key", bound=Hashable)
Part = TypeVar("Part", bound=_Waiting)


class _Turns(Generic[Key, Part]):
    """The parts of an account with waiting sequences. The part that has used least goes first.

    The heap has an entry (use, arrival of a sequence, key) for each part that is not set aside. A part whose use has
    grown since is put right when it comes to the top.
    """

    def __init__(self, account: Account) -> None:
        self.account = account
        self.parts: dict[Key, Part] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._aside: set[Key] = set()

    def first_part(self) -> Part | None:
        """The part that goes next."""
        while self._heap:
            use_s, arrival, key = self._heap[0]
            part = self.parts[key]
            if use_s >= part.account.use_s:
                self.account.floor_s = use_s
                return part
            heapq.heapreplace(self._heap, (part.account.use_s, arrival, key))
        return None

    @property
    def first(self) -> Sequence | None:
        """The sequence that goes next. None if all are set aside."""
        part = self.first_part()
        return None if part is None else part.first

    def add(self, key: Key, part: Part) -> None:
        """A part has something waiting from now on. Its use rises to the least use of the others."""
        self.first_part()
        part.account.step_s += max(0.0, self.account.floor_s - part.account.use_s)
        self.parts[key] = part
        self._push(key)

    def remove(self, key: Key) -> None:
        """A part has nothing waiting any more."""
        del self.parts[key]
        if key in self._aside:
            self._aside.remove(key)
        elif self._heap[0][2] == key:
            heapq.heappop(self._heap)
        else:
            self._heap = [entry for entry in self._heap if entry[2] != key]
            heapq.heapify(self._heap)

    def set_first_aside(self) -> None:
        """Pass over the first part until `restore`."""
        _, _, key = heapq.heappop(self._heap)
        self._aside.add(key)

    def restore(self, key: Key) -> None:
        """Let a part that may be set aside take turns again, with the use that it has."""
        if key in self._aside:
            self._aside.remove(key)
            self._push(key)

    def check_integrity(self) -> None:
        listed = [key for _, _, key in self._heap]
        assert len(listed) == len(set(listed)), "a part is listed twice"
        assert not self._aside
        assert set(listed) == self.parts.keys(), "nobody will look at a part"
        assert all(use_s <= self.parts[key].account.use_s for use_s, _, key in self._heap)

    def _push(self, key: Key) -> None:
        part = self.parts[key]
        first = part.first
        assert first is not None
        heapq.heappush(self._heap, (part.account.use_s, first.arrival, key))


class _Line:
    """The waiting sequences of one client and adapter, by their places (`Sequence.place`)."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.sequences: list[tuple[int, int, Sequence]] = []

    @property
    def first(self) -> Sequence | None:
        return self.sequences[0][2] if self.sequences else None

    def add(self, sequence: Sequence) -> None:
        insort(self.sequences, (sequence.place, sequence.arrival, sequence))

    def remove(self, sequence: Sequence) -> None:
        del self.sequences[bisect_left(self.sequences, (sequence.place, sequence.arrival))]


_Client = _Turns[TaskId | None, _Line]
_Priority = _Turns[str, _Client]


class FairQueue:
    """The sequences that wait. The order: the smallest priority; of that the client with the least account; of that the
    adapter with the least account; of that the first place.

    A sequence's place is that of its arrival, and one further back for each `TOKENS_OF_A_PLACE` tokens of its prompt
    and of the sequences before it in the same request of a client. So a small request does not wait for all of one
    that is long or has many sequences, even where nobody can tell their clients apart. The sequences that it passes
    wait for no more than about as much work as they bring themselves.

    When nothing of a client has waited for a while, its account is lifted to the least waiting one. This is the virtual
    counter of Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024: while two clients have requests
    waiting, their use differs by no more than the work that can run at once.

    A sequence is `add`ed, taken to run (`take`), perhaps `put_back`, and at its end, waiting or running, `discard`ed.
    The first of these cost the logarithm of the number of clients, of adapters and of sequences.
    """

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._priorities: dict[int, _Priority] = {}
        self._order: list[int] = []
        self._set_aside: list[Sequence] = []
        self._waiting: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        """All waiting sequences, in no particular order."""
        return iter(self._waiting)

    @property
    def first(self) -> Sequence | None:
        """The sequence that starts next."""
        found = (self._priorities[priority].first for priority in self._order)
        return next((sequence for sequence in found if sequence is not None), None)

    def add(self, sequence: Sequence) -> None:
        """A new sequence, whose account opens."""
        request = sequence.request
        num_tokens = request.num_tokens_ahead + len(request.prompt_token_ids)
        sequence.place = sequence.arrival + num_tokens // TOKENS_OF_A_PLACE
        self._accounts.open(sequence)
        self._wait(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Put a taken sequence back, before all others of its adapter. Of several, put the last arrival back first."""
        line = self._line(sequence)
        first = None if line is None else line.first
        sequence.place = min(sequence.arrival, sequence.arrival if first is None else first.place) - 1
        self._wait(sequence)

    def hurry(self, sequence: Sequence) -> None:
        """From now on, no later sequence of the same client and adapter passes a sequence, waiting or running."""
        is_waiting = sequence in self._waiting
        if is_waiting:
            self.take(sequence)
        sequence.place = min(sequence.place, sequence.arrival)
        if is_waiting:
            self._wait(sequence)

    def take(self, sequence: Sequence) -> None:
        """A waiting sequence starts to run."""
        priority, name, task_id = _path(sequence)
        clients = self._priorities[priority]
        client = clients.parts[name]
        client.parts[task_id].remove(sequence)
        self._waiting.remove(sequence)
        if client.parts[task_id].first is None:
            client.remove(task_id)
        if not client.parts:
            clients.remove(name)
        if not clients.parts:
            del self._priorities[priority]
            self._order.remove(priority)

    def set_aside(self, sequence: Sequence) -> None:
        """The `first` sequence cannot start now, nor those of its client and adapter after it: pass over them until
        `restore`.
        """
        priority, name, _ = _path(sequence)
        clients = self._priorities[priority]
        clients.parts[name].set_first_aside()
        if clients.parts[name].first is None:
            clients.set_first_aside()
        self._set_aside.append(sequence)

    def restore(self) -> None:
        for sequence in self._set_aside:
            priority, name, task_id = _path(sequence)
            self._priorities[priority].parts[name].restore(task_id)
            self._priorities[priority].restore(name)
        self._set_aside.clear()

    def turn(self, sequence: Sequence) -> tuple[int, float, int]:
        """Sorts prompts, waiting or running, in the order in which they are computed.

        Prompts of one client are computed one after the other: in turns, all would come to their ends late.
        """
        return sequence.request.priority, self._accounts.client(sequence).use_s, sequence.place

    def discard(self, sequence: Sequence) -> None:
        """A sequence has ended, waiting or running."""
        if sequence in self._waiting:
            self.take(sequence)
        self._accounts.close(sequence)

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Every sequence waits in one place and has an account. running: the sequences that were taken."""
        assert self._order == sorted(self._priorities)
        assert not self._set_aside
        assert all(s.status is SequenceStatus.WAITING and not s.block_table.length for s in self)
        found: list[Sequence] = []
        for clients in self._priorities.values():
            clients.check_integrity()
            for client in clients.parts.values():
                client.check_integrity()
                for line in client.parts.values():
                    assert line.sequences == sorted(line.sequences, key=lambda entry: entry[:2])
                    assert all(place == s.place for place, _, s in line.sequences)
                    found += [sequence for _, _, sequence in line.sequences]
        assert len(found) == len(self._waiting)
        assert set(found) == self._waiting
        for sequence in (*found, *running):
            assert self._accounts.adapter(sequence).num_users > 0, "a sequence has no account"

    def _line(self, sequence: Sequence) -> _Line | None:
        priority, name, task_id = _path(sequence)
        clients = self._priorities.get(priority)
        client = None if clients is None else clients.parts.get(name)
        return None if client is None else client.parts.get(task_id)

    def _wait(self, sequence: Sequence) -> None:
        priority, name, task_id = _path(sequence)
        self._waiting.add(sequence)
        if (line := self._line(sequence)) is not None:
            line.add(sequence)
            return
        line = _Line(self._accounts.adapter(sequence))
        line.add(sequence)
        if priority not in self._priorities:
            self._priorities[priority] = _Turns(self._accounts.clients)
            insort(self._order, priority)
        clients = self._priorities[priority]
        is_new = name not in clients.parts
        client: _Client = _Turns(self._accounts.client(sequence)) if is_new else clients.parts[name]
        client.add(task_id, line)
        if is_new:
            clients.add(name, client)
        else:
            clients.restore(name)


def _path(sequence: Sequence) -> tuple[int, str, TaskId | None]:
    """Priority, client and adapter of a sequence."""
    request = sequence.request
    return request.priority, request.sender.account, request.task_id
