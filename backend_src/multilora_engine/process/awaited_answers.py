"""`AwaitedAnswer`: an answer that waits for a file or a source, while the engine goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass

import msgspec

from multilora_engine.errors import AdapterNotKept
from multilora_engine.lora.names import TaskId, label_of
from multilora_engine.process.reports import Report
from multilora_engine.request import TokenOutput

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class AwaitedAnswer:
    """The answer of one request to one front. `answer` is called once `is_ready`, and may raise a RequestError."""

    front: bytes
    request_id: str
    is_ready: Callable[[], bool]
    answer: Callable[[], TokenOutput]


def upload_output(done: TokenOutput, task_id: TaskId, write: Future[None]) -> TokenOutput:
    """`done`, once the adapter's file is written: an acknowledged adapter is never lost. Raises AdapterNotKept."""
    try:
        write.result()
    except OSError as error:
        raise AdapterNotKept(task_id, str(error)) from error
    except CancelledError:
        logger.info("LoRA task %s was unloaded or replaced before its file was written", label_of(task_id))
    return done


def report_output(request_id: str, report: Report) -> TokenOutput:
    """The final output of an operation: its text is the report, in JSON."""
    return TokenOutput(request_id, [], msgspec.json.encode(report).decode(), finish_reason="stop")
