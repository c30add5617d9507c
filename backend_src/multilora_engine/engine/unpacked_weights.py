"""`UnpackedWeights`: the weights of a quantised base that are also kept as floats, switched between two steps."""

from __future__ import annotations

import fnmatch
import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from multilora_engine.engine.engine_stats import WeightStats
from multilora_engine.engine.memory import is_out_of_memory
from multilora_engine.engine.weight_info import PathChoice, WeightInfo, is_glob
from multilora_engine.errors import ConfigError, InternalError, InvalidRequest, UnpackedWeightsFull, WeightsBusy
from multilora_engine.models.model import Model
from multilora_engine.models.weights import MEASURED_ROWS, WeightSwitch
from multilora_kernels import PackedWeight
from multilora_kernels.linear import packed_linear
from multilora_kernels.quantized import QuantizedWeight, quantized_linear

_logger = logging.getLogger(__name__)

_NUM_RUNS = 9
"""Times that products of each kind are timed; the shortest counts, as others may have waited for something else."""

_TIMED_BYTES = 1 << 25
"""Floats of the weights whose products are timed together: what begins and ends such a row of them hardly counts."""

_READ_BYTES = 1 << 27
"""Bytes of other weights that are read before: more than caches hold."""

_CLEARLY_LESS = 0.9
"""The share of another time that is clearly less, however noisy the machine."""

_Shape = tuple[torch.Size, str, int]


@dataclass(frozen=True)
class ProductTimes:
    """The seconds of a product of each of MEASURED_ROWS, by codes and by floats, of the weights of one shape and kind.

    kind: of the codes, in words.
    """

    shape: torch.Size
    kind: str
    codes: tuple[float, ...]
    floats: tuple[float, ...]

    @property
    def float_classes(self) -> frozenset[int]:
        """The row classes in which floats are taken: those in which codes were not clearly faster.

        A class is measured at its least rows, and more of them favour floats, whose memory is taken already.
        """
        pairs = enumerate(zip(self.codes, self.floats, strict=True))
        return frozenset(row_class for row_class, (codes, floats) in pairs if codes > _CLEARLY_LESS * floats)

    def __str__(self) -> str:
        rows = zip(MEASURED_ROWS, self.codes, self.floats, strict=True)
        times = ", ".join(f"{codes * 1e6:.0f}/{floats * 1e6:.0f} of {n}" for n, codes, floats in rows)
        return f"{self.shape[0]} x {self.shape[1]}, {self.kind}: {times}"


@dataclass(frozen=True)
class PendingWeights:
    """A switch to floats on its way. is_ready: whether `finish` can make it by now."""

    is_ready: Callable[[], bool]
    finish: Callable[[], list[WeightInfo]]


class UnpackedWeights:
    """Lives on the engine's thread; floats are made on a thread of its own, and taken up between two steps."""

    def __init__(self, model: Model, max_bytes: int) -> None:
        """max_bytes: of all floats together. `start` comes before everything else."""
        self._model = model
        self._switches = list(model.weight_switches)
        self._places = {name: place for place, switch in enumerate(self._switches) for name in switch.names}
        self._max_bytes = max_bytes
        self._packed_bytes = sum(model.weight_bytes.values())
        self._worker = ThreadPoolExecutor(1, "unpack")
        self._is_unpacking = False
        self._compared: dict[_Shape, ProductTimes] = {}

    @property
    def comparisons(self) -> list[ProductTimes]:
        """What `auto` goes by, for each kind of weights that the budget can hold."""
        return list(self._compared.values())

    @property
    def stats(self) -> WeightStats:
        return WeightStats(self._packed_bytes, self._unpacked_bytes, self._max_bytes)

    def describe(self, patterns: Sequence[str]) -> list[WeightInfo]:
        """The weights of codes that a pattern means. Raises InvalidRequest for one that means none."""
        return [_describe(switch) for switch in self._find(patterns)]

    def pack(self, patterns: Sequence[str]) -> list[WeightInfo]:
        """Drop the floats. Raises as `describe`, and WeightsBusy while others are being made."""
        found = self._find(patterns)
        self._check_idle()
        for switch in found:
            switch.floats, switch.float_classes = None, frozenset()
        self._model.note_switch()
        return [_describe(switch) for switch in found]

    def unpack(self, patterns: Sequence[str], choice: PathChoice) -> PendingWeights:
        """Make floats of the weights. choice: `auto` takes them where they were faster, `unpacked` always.

        Raises as `pack`, and where they exceed the budget UnpackedWeightsFull, or InvalidRequest if they always would;
        nothing has changed then.
        """
        found = self._find(patterns)
        self._check_idle()
        new = [switch for switch in found if switch.floats is None]
        needed = sum(switch.codes.unpacked_nbytes for switch in new)
        if needed > self._max_bytes:
            raise InvalidRequest(
                f"the floats of {len(new)} weights take {needed} bytes, and unpacked_weights_memory_bytes is "
                f"{self._max_bytes}; unpack fewer, or start the server with more"
            )
        if self._unpacked_bytes + needed > self._max_bytes:
            raise UnpackedWeightsFull(len(new), needed, self._unpacked_bytes, self._max_bytes)
        self._is_unpacking = True
        made = self._worker.submit(_unpacked, new)
        return PendingWeights(made.done, lambda: self._finish(found, new, made, choice))

    def start(self, patterns: Sequence[str]) -> None:
        """Unpack with `auto`, as `unpack` does, and return when it is done.

        With a budget, codes and floats are compared on this machine: the floats that were made as they lie, since
        memory is not equally fast everywhere, and passing ones of the other kinds.
        Raises ConfigError for a pattern that means no weight, too small a budget or a lack of memory.
        """
        if self._max_bytes and not self._switches:
            _logger.warning("unpacked_weights_memory_bytes does nothing: the model has no quantised weights")
        try:
            found = self._find(patterns)
            needed = sum(switch.codes.unpacked_nbytes for switch in found)
            if needed > self._max_bytes:
                raise ConfigError(
                    f"parameter unpacked_weights: its floats take {needed} bytes, and unpacked_weights_memory_bytes is "
                    f"{self._max_bytes}; write {needed} there, or fewer names"
                )
            floats = _unpacked(found)
            if self._max_bytes:
                self._compare(dict(zip(map(id, found), floats, strict=True)))
            self._take_up(found, found, floats, "auto")
        except (InvalidRequest, InternalError) as error:
            raise ConfigError(f"parameter unpacked_weights: {error}") from error

    def close(self) -> None:
        """Forget the floats that are being made."""
        self._worker.shutdown(cancel_futures=True)

    @property
    def _unpacked_bytes(self) -> int:
        return sum(switch.floats.data.nbytes for switch in self._switches if switch.floats is not None)

    def _finish(
        self,
        found: Sequence[WeightSwitch],
        new: Sequence[WeightSwitch],
        made: Future[list[PackedWeight]],
        choice: PathChoice,
    ) -> list[WeightInfo]:
        self._is_unpacking = False
        return self._take_up(found, new, made.result(timeout=0), choice)

    def _take_up(
        self,
        found: Sequence[WeightSwitch],
        new: Sequence[WeightSwitch],
        floats: Sequence[PackedWeight],
        choice: PathChoice,
    ) -> list[WeightInfo]:
        for switch, weight in zip(new, floats, strict=True):
            switch.floats = weight
        everywhere = frozenset(range(len(MEASURED_ROWS)))
        for switch in found:
            switch.float_classes = everywhere if choice == "unpacked" else self._compared[_shape(switch)].float_classes
        self._model.note_switch()
        return [_describe(switch) for switch in found]

    def _check_idle(self) -> None:
        if self._is_unpacking:
            raise WeightsBusy

    def _find(self, patterns: Sequence[str]) -> list[WeightSwitch]:
        found: set[int] = set()
        for pattern in dict.fromkeys(patterns):
            names = fnmatch.filter(self._places, pattern) if is_glob(pattern) else [pattern]
            places = {self._places[name] for name in names if name in self._places}
            if not places:
                raise InvalidRequest(
                    f"no quantised weight of the model is named {pattern[:200]!r}; one is {next(iter(self._places))}"
                    if self._places
                    else "the model has no quantised weights"
                )
            found |= places
        return [self._switches[place] for place in sorted(found)]

    def _compare(self, floats: Mapping[int, PackedWeight]) -> None:
        """Compare the products of each kind of weight that the budget can hold. floats: those there are, by id."""
        alike: defaultdict[_Shape, list[WeightSwitch]] = defaultdict(list)
        for switch in self._switches:
            alike[_shape(switch)].append(switch)
        most = min(self._max_bytes, _TIMED_BYTES)
        for shape, switches in alike.items():
            num_bytes = switches[0].codes.unpacked_nbytes
            if num_bytes > self._max_bytes:
                continue
            ready = [switch for switch in switches if id(switch) in floats]
            timed = (ready or switches)[: max(1, most // num_bytes)]
            places = [floats[id(switch)] if ready else switch.codes.unpacked() for switch in timed]
            others = [switch.codes for switch in self._switches if not any(switch is one for one in timed)]
            self._compared[shape] = _comparison(timed[0].kind, [switch.codes for switch in timed], places, others)
            _logger.info("microseconds of a product by codes/floats at so many rows: %s", self._compared[shape])


def _unpacked(switches: Sequence[WeightSwitch]) -> list[PackedWeight]:
    """One weight after another, so that little more than the floats is needed. Raises InternalError without memory."""
    try:
        return [switch.codes.unpacked() for switch in switches]
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise InternalError(f"no memory for the floats of {len(switches)} weights: {error}") from error


@torch.inference_mode()
def _comparison(
    kind: str, weights: Sequence[QuantizedWeight], floats: Sequence[PackedWeight], others: Sequence[QuantizedWeight]
) -> ProductTimes:
    """Time the products of weights of one kind, and of their floats.

    others: weights that a step reads between two products of one of these. They are read before each time: from the
    caches floats come as fast as codes, from memory they are four or eight times the bytes.
    """
    products: tuple[Callable[[torch.Tensor], object], ...] = (
        lambda x: [quantized_linear(x, codes) for codes in weights],
        lambda x: [packed_linear(x, weight) for weight in floats],
    )
    shortest: tuple[list[float], list[float]] = ([], [])
    for num_rows in MEASURED_ROWS:
        x = torch.ones(num_rows, weights[0].shape[1], dtype=floats[0].data.dtype, device=floats[0].data.device)
        seconds: tuple[list[float], list[float]] = ([], [])
        for _, (product, measured) in itertools.product(range(_NUM_RUNS), zip(products, seconds, strict=True)):
            _read(others)
            measured.append(_seconds(product, x) / len(weights))
        for ends, measured in zip(shortest, seconds, strict=True):
            ends.append(min(measured))
    return ProductTimes(weights[0].shape, kind, tuple(shortest[0]), tuple(shortest[1]))


def _read(weights: Sequence[QuantizedWeight]) -> None:
    """Read weights of up to _READ_BYTES, so that the caches hold them and nothing else."""
    num_bytes = 0
    for weight in weights:
        if num_bytes < _READ_BYTES:
            weight.read()
            num_bytes += weight.nbytes


def _seconds(product: Callable[[torch.Tensor], object], x: torch.Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize()
    started = time.perf_counter()
    product(x)
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _shape(switch: WeightSwitch) -> _Shape:
    return switch.codes.shape, switch.kind, switch.codes.group_size


def _describe(switch: WeightSwitch) -> WeightInfo:
    rows = [MEASURED_ROWS[row_class] for row_class in sorted(switch.float_classes)]
    unpacked_bytes = 0 if switch.floats is None else switch.floats.data.nbytes
    return WeightInfo(
        list(switch.names), switch.kind, switch.codes.nbytes, unpacked_bytes, switch.codes.unpacked_nbytes, rows
    )
