"""`MemoryAhead`: takes the memory of a tensor's next slots before somebody writes to them.

Slots that nobody has used yet take no memory. The first write to a page waits for Linux to clear it: 100 ms if a step
writes to every layer of a KV cache, 26 ms for an adapter of 9 MB on a virtual machine. So a thread takes the memory of
the next slots while steps compute.
"""

from __future__ import annotations

import logging
import os
import threading

import torch

from multilora_kernels import huge_pages

_logger = logging.getLogger(__name__)

_NICENESS = 10
"""The thread's niceness. Steps go first; if the thread is late, a step takes a page itself."""


class MemoryAhead:
    """Tensors of `HugePages`, [num_layers, num_slots, ...]. Slots are used from the first one on.

    Memory is taken by strides. In each layer, the slots of a stride fill about one huge page.
    """

    def __init__(self, *tensors: torch.Tensor, num_strides_ahead: int = 2, or_all: bool = True) -> None:
        """Takes the memory of the first stride. Raises OSError if memory is lacking.

        num_strides_ahead: how many strides have memory before they are used. More than one, because slots may be used
            faster than the thread takes a stride.
        or_all: what to do if Linux cannot take memory ahead: take the memory of all slots now, or leave it to writes.
        """
        self._tensors = tensors
        self._num_strides_ahead = num_strides_ahead
        self._num_slots = tensors[0].shape[1]
        self._stride = max(1, huge_pages.HUGE_PAGE_BYTES // (tensors[0][0, 0].nbytes or 1))
        self._num_taken = 0
        self._num_wanted = 0
        self._thread = threading.Thread(target=self._take_ahead)
        if not self._take_stride():
            self._num_taken = self._num_slots
            if or_all:
                _logger.info("this Linux takes no memory ahead of its use: all of it is taken now")
                for tensor in tensors:
                    tensor.zero_()

    def note_use(self, num_slots: int) -> None:
        """Note that the first `num_slots` slots are used now. A thread takes the memory of some strides after them."""
        wanted = num_slots + self._num_strides_ahead * self._stride
        self._num_wanted = max(self._num_wanted, min(wanted, self._num_slots))
        if self._num_taken < self._num_wanted and not self._thread.is_alive():
            # No daemon thread: the end of a process would stop it within a function of torch, and so abort. As it is,
            # the end of the process waits for a few strides.
            self._thread = threading.Thread(target=self._take_ahead, name="memory-ahead")
            self._thread.start()

    def take_all(self) -> None:
        """Take the memory of all slots, and return when it is taken."""
        while self._num_taken < self._num_slots:
            self.note_use(self._num_slots)
            self.wait()

    def wait(self) -> None:
        """Return when the memory is taken that `note_use` asked for."""
        if self._thread.is_alive():
            self._thread.join()

    def _take_ahead(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            while self._num_taken < self._num_wanted:
                self._take_stride()
        except OSError as error:
            _logger.warning("cannot take memory ahead of its use, steps do it from here on: %s", error)
            self._num_taken = self._num_slots

    def _take_stride(self) -> bool:
        """Take the memory of the next slots, in every layer. False if Linux cannot."""
        end = min(self._num_taken + self._stride, self._num_slots)
        can_take = all(
            huge_pages.populate(layer[self._num_taken : end]) for tensor in self._tensors for layer in tensor
        )
        self._num_taken = end
        return can_take
