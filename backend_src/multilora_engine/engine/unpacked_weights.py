"""`UnpackedWeights`: the weights of a quantised base that are also kept as floats, switched between two steps."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from multilora_engine.engine.engine_stats import WeightInfo, WeightStats
from multilora_engine.engine.memory import available_memory
from multilora_engine.errors import InternalError, InvalidRequest, UnpackedWeightsFull, Unsupported, WeightsBusy
from multilora_engine.models.model import Model
from multilora_engine.models.weights import WeightSwitch
from multilora_engine.out_of_memory import is_out_of_memory
from multilora_kernels import PackedWeight


@dataclass(frozen=True)
class PendingWeights:
    """A switch to floats on its way. is_ready: whether `finish` can make it by now."""

    is_ready: Callable[[], bool]
    finish: Callable[[], list[WeightInfo]]


class UnpackedWeights:
    """Lives on the engine's thread; floats are made on a thread of its own, and taken up between two steps.

    An unpacked weight is multiplied as floats from then on, a packed one as codes. The two may differ in last bits.
    """

    def __init__(
        self,
        model: Model,
        max_bytes: int,
        device: torch.device,
        on_switch: Callable[[], None] = lambda: None,
        has_graphs: bool = False,
    ) -> None:
        """max_bytes: of all floats together. device: of the model. on_switch: called after weights were switched.

        has_graphs: whether steps are replayed as they were captured, with codes. No weight is unpacked then.
        """
        self._model = model
        self._switches = list(model.weight_switches)
        self._places = {name: place for place, switch in enumerate(self._switches) for name in switch.names}
        self._max_bytes = 0 if has_graphs else max_bytes
        self._has_graphs = has_graphs
        self._device = device
        self._on_switch = on_switch
        self._packed_bytes = sum(model.weight_bytes.values())
        self._worker = ThreadPoolExecutor(1, "unpack")
        self._is_unpacking = False

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
        self._switch([(switch, None) for switch in found if switch.floats is not None])
        return [_describe(switch) for switch in found]

    def unpack(self, patterns: Sequence[str]) -> PendingWeights:
        """Make floats of the weights.

        Raises as `pack`, Unsupported beside graphs, and UnpackedWeightsFull where memory does not hold them; nothing
        has changed then.
        """
        found = self._find(patterns)
        if self._has_graphs:
            raise Unsupported(
                "the weights stay codes: this server replays its GPU's steps as CUDA graphs, which multiply codes, and "
                "steps without graphs would take several times as long"
            )
        self._check_idle()
        new = [switch for switch in found if switch.floats is None]
        needed = sum(switch.codes.unpacked_nbytes for switch in new)
        left = self._max_bytes - self._unpacked_bytes
        if self._device.type == "cpu":
            left = min(left, available_memory())  # Other processes take of it, too.
        if needed > left:
            raise UnpackedWeightsFull(len(new), needed, self._unpacked_bytes, left)
        self._is_unpacking = True
        made = self._worker.submit(_unpacked, new)
        return PendingWeights(made.done, lambda: self._finish(found, new, made))

    def close(self) -> None:
        """Forget the floats that are being made."""
        self._worker.shutdown(cancel_futures=True)

    @property
    def _unpacked_bytes(self) -> int:
        return sum(switch.floats.data.nbytes for switch in self._switches if switch.floats is not None)

    def _finish(
        self, found: Sequence[WeightSwitch], new: Sequence[WeightSwitch], made: Future[list[PackedWeight]]
    ) -> list[WeightInfo]:
        self._is_unpacking = False
        self._switch(list(zip(new, made.result(timeout=0), strict=True)))
        return [_describe(switch) for switch in found]

    def _switch(self, switched: Sequence[tuple[WeightSwitch, PackedWeight | None]]) -> None:
        if not switched:
            return
        for switch, floats in switched:
            switch.floats = floats
        self._model.note_switch()
        self._on_switch()

    def _check_idle(self) -> None:
        if self._is_unpacking:
            raise WeightsBusy

    def _find(self, patterns: Sequence[str]) -> list[WeightSwitch]:
        found: set[int] = set()
        for pattern in dict.fromkeys(patterns):
            names = [pattern] if pattern in self._places else fnmatch.filter(self._places, pattern)
            if not names:
                raise InvalidRequest(
                    f"no quantised weight of the model is named {pattern[:200]!r}; one is {next(iter(self._places))}"
                    if self._places
                    else "the model has no quantised weights, or only those of experts, which stay codes"
                )
            found.update(self._places[name] for name in names)
        return [self._switches[place] for place in sorted(found)]


def _unpacked(switches: Sequence[WeightSwitch]) -> list[PackedWeight]:
    """One weight after another, so that little more than the floats is needed. Raises InternalError without memory."""
    try:
        return [switch.codes.unpacked() for switch in switches]
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise InternalError(f"no memory for the floats of {len(switches)} weights: {error}") from error


def _describe(switch: WeightSwitch) -> WeightInfo:
    codes, floats = switch.codes, switch.floats
    unpacked_bytes = 0 if floats is None else floats.data.nbytes
    return WeightInfo(list(switch.names), switch.kind, codes.nbytes, unpacked_bytes, codes.unpacked_nbytes)
