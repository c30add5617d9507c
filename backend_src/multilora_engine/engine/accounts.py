"""`Accounts`: one account for each client, in seconds of the engine's thread. `FairQueue`: the order that it gives."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator

from multilora_engine.errors import TooMuchHostWork
from multilora_engine.request import SamplingParams, Sender
from multilora_engine.sequences.sequence import Sequence, SequenceStatus

TOKENS_OF_A_PLACE = 32
"""A waiting sequence lets one later sequence pass for each so many tokens."""

HOST_WORK_S = 0.05
"""The time in a step that words, guides and beams of all requests may take together."""

_MAX_DEBT = 5
"""A request may owe at most this many times that time."""

_MAX_CHARGE = 2
"""One step charges a request at most this many times that time."""


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
    """The account of each client with sequences in the engine, with accounts of its adapters and of the base model.

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


class _Waiting:
    """What waits under an account: the sequences of an adapter, by their places, or the parts of the account, in turns.

    The part that has used least goes first. The heap has an entry (use, arrival of a sequence, key) for each part that
    `is_listed`. An entry is put right when it comes to the top: its part may have used more since, or be set aside.
    """

    def __init__(self, account: Account) -> None:
        self.account = account
        self.line: list[tuple[int, int, Sequence]] = []
        self.parts: dict[Hashable, _Waiting] = {}
        self.is_aside = False
        self.is_listed = False
        self._heap: list[tuple[float, int, Hashable]] = []

    @property
    def first(self) -> Sequence | None:
        """The sequence that goes next. None if nothing waits, or all of it is set aside."""
        if self.line:
            return None if self.is_aside else self.line[0][2]
        while self._heap:
            use_s, arrival, key = self._heap[0]
            part = self.parts[key]
            if (first := part.first) is None:
                heapq.heappop(self._heap)
                part.is_listed = False
            elif use_s < part.account.use_s:
                heapq.heapreplace(self._heap, (part.account.use_s, arrival, key))
            else:
                self.account.floor_s = use_s
                return first
        return None

    def add(self, path: list[Hashable], sequence: Sequence) -> None:
        """A sequence waits at the end of a path of keys. The use of a part that had nothing waiting rises to the least
        use of the other parts."""
        if not path:
            insort(self.line, (sequence.place, sequence.arrival, sequence))
            return
        key, *rest = path
        part = self.parts.get(key)
        if part is None:
            part = _Waiting(self.account.parts[key])
            _ = self.first  # which sets the floor
            part.account.step_s += max(0.0, self.account.floor_s - part.account.use_s)
            self.parts[key] = part
        part.add(rest, sequence)
        self._list(key)

    def remove(self, path: list[Hashable], sequence: Sequence) -> None:
        """A sequence at the end of a path waits no longer."""
        if not path:
            del self.line[bisect_left(self.line, (sequence.place, sequence.arrival))]
            return
        key, *rest = path
        part = self.parts[key]
        part.remove(rest, sequence)
        if not part.line and not part.parts:
            del self.parts[key]
            if self._heap and self._heap[0][2] == key:
                heapq.heappop(self._heap)
            elif part.is_listed:
                self._heap = [entry for entry in self._heap if entry[2] != key]
                heapq.heapify(self._heap)

    def restore(self, path: list[Hashable]) -> None:
        """The sequences at the end of a path are not set aside any more."""
        self.is_aside = False
        if path:
            key, *rest = path
            self.parts[key].restore(rest)
            self._list(key)

    def sequences(self) -> Iterator[Sequence]:
        """All that wait, with checks. For tests, after every step."""
        listed = {key for _, _, key in self._heap}
        assert not self.is_aside
        assert len(listed) == len(self._heap), "a part is listed twice"
        assert listed == self.parts.keys(), "nobody will look at a part"
        assert all(part.is_listed for part in self.parts.values())
        assert all(use_s <= self.parts[key].account.use_s for use_s, _, key in self._heap)
        assert self.line == sorted(((s.place, s.arrival, s) for *_, s in self.line), key=lambda entry: entry[:2])
        yield from (sequence for *_, sequence in self.line)
        for part in self.parts.values():
            yield from part.sequences()

    def _list(self, key: Hashable) -> None:
        part = self.parts[key]
        if not part.is_listed and (first := part.first) is not None:
            heapq.heappush(self._heap, (part.account.use_s, first.arrival, key))
            part.is_listed = True


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
        self._priorities: dict[int, _Waiting] = {}
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
        found = (self._priorities[priority].first for priority in sorted(self._priorities))
        return next((sequence for sequence in found if sequence is not None), None)

    def add(self, sequence: Sequence) -> None:
        """A new sequence, whose account opens."""
        request = sequence.request
        num_tokens = request.num_tokens_ahead + request.num_prompt_tokens
        sequence.place = sequence.arrival + num_tokens // TOKENS_OF_A_PLACE
        self._accounts.open(sequence)
        self._wait(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Put a taken sequence back, before all others of its adapter. Of several, put the last arrival back first."""
        line = self._line(sequence)
        sequence.place = min(sequence.arrival, line[0][0] if line else sequence.arrival) - 1
        self._wait(sequence)

    def hurry(self, sequence: Sequence) -> None:
        """From now on, no later sequence of the same client and adapter passes a sequence, waiting or running."""
        if is_waiting := sequence in self._waiting:
            self.take(sequence)
        sequence.place = min(sequence.place, sequence.arrival)
        if is_waiting:
            self._wait(sequence)

    def take(self, sequence: Sequence) -> None:
        """A waiting sequence starts to run."""
        self._waiting.remove(sequence)
        priority = sequence.request.priority
        self._priorities[priority].remove(_path(sequence), sequence)
        if not self._priorities[priority].parts:
            del self._priorities[priority]

    def set_aside(self, sequence: Sequence) -> None:
        """The `first` sequence cannot start now, nor can later sequences of its client and adapter: pass over them
        all until `restore`.
        """
        name, task_id = _path(sequence)
        self._priorities[sequence.request.priority].parts[name].parts[task_id].is_aside = True
        self._set_aside.append(sequence)

    def restore(self) -> None:
        for sequence in self._set_aside:
            self._priorities[sequence.request.priority].restore(_path(sequence))
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
        assert not self._set_aside
        assert all(s.status is SequenceStatus.WAITING and not s.block_table.length for s in self)
        assert not any(s.source is not None and s.source.block_table.length for s in self)
        found = [sequence for waiting in self._priorities.values() for sequence in waiting.sequences()]
        assert len(found) == len(self._waiting)
        assert set(found) == self._waiting
        for sequence in (*found, *running):
            assert self._accounts.client(sequence).num_users > 0, "a sequence has no account"

    def _line(self, sequence: Sequence) -> list[tuple[int, int, Sequence]]:
        """The sequences of the same priority, client and adapter that wait."""
        waiting = self._priorities.get(sequence.request.priority)
        for key in _path(sequence):
            waiting = None if waiting is None else waiting.parts.get(key)
        return [] if waiting is None else waiting.line

    def _wait(self, sequence: Sequence) -> None:
        self._waiting.add(sequence)
        waiting = self._priorities.setdefault(sequence.request.priority, _Waiting(self._accounts.clients))
        waiting.add(_path(sequence), sequence)


def _path(sequence: Sequence) -> list[Hashable]:
    """Client and adapter of a sequence."""
    return [sequence.request.sender.account, sequence.request.task_id]
