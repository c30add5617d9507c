"""What stands in for a front's requests: listeners that record what they hear."""

from __future__ import annotations

import queue
import threading

from multilora_engine.request import GenerationRequest, SamplingParams, TokenOutput

TIMEOUT_S = 300.0
"""Only against tests that hang: tests wait for events, which a busy machine may delay by minutes."""


class RecordingListener:
    """Keeps the outputs of a call. `is_cancelled` says what `cancel` has set."""

    unsent_bytes = 0

    def __init__(self, num_requests: int = 1) -> None:
        self.outputs: list[TokenOutput] = []
        self.num_outputs_at_flush: list[int] = []
        self.threads: set[int] = set()
        self._num_open = num_requests
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._cancelled = threading.Event()

    def on_output(self, output: TokenOutput) -> None:
        self.outputs.append(output)
        self.threads.add(threading.get_ident())
        if output.is_final:
            self._num_open -= 1
        if self._num_open == 0 or output.error_code is not None:
            self._ended.put(None)

    def flush(self) -> None:
        self.num_outputs_at_flush.append(len(self.outputs))

    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        self._cancelled.set()

    def wait(self) -> list[TokenOutput]:
        """All outputs, once the call has ended."""
        self._ended.get(timeout=TIMEOUT_S)
        return self.outputs

    @property
    def num_ends(self) -> int:
        """How often the call has ended, less the `wait`s."""
        return self._ended.qsize()


def generation_request(
    request_id: str, prompt: list[int], max_tokens: int = 3, lora_task_id: int | None = None
) -> GenerationRequest:
    return GenerationRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens), lora_task_id)
