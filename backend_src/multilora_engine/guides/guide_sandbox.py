"""`GuideSandbox`: tries guides in a process with limits before the engine compiles them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from multilora_engine.errors import InvalidRequest
from multilora_engine.guides.guide_grammar import TokenTable
from multilora_engine.guides.guide_sandbox_process import LIMITS, Trial
from multilora_engine.log_lines import one_line
from multilora_engine.request import Guide
from multilora_engine.sandbox import Sandbox

_MAX_ERROR_CHARS = 500


@dataclass
class GuideWatch:
    """Shared by the thread that waits for a guide and the thread that compiles it.

    is_wanted: whether anybody still waits for the guide. Any thread may call it.
    seconds: the CPU time that the guide took in the sandbox.
    """

    is_wanted: Callable[[], bool] = lambda: True
    seconds: float = 0.0


class GuideSandbox(Sandbox):
    """Tries each guide in a process of its own."""

    def __init__(self, table: TokenTable) -> None:
        super().__init__("multilora_engine.guides.guide_sandbox_process", LIMITS, msgspec.msgpack.encode(table))

    def try_guide(self, guide: Guide, watch: GuideWatch) -> Trial:
        """Compile a guide in a process of its own.

        Raises InvalidRequest if the guide is malformed or exceeds a limit, Cancelled if nobody wants the guide any
        more, and Unavailable if its process ended for another reason.
        """
        outcome = self.ask(msgspec.msgpack.encode(guide), watch.is_wanted)
        watch.seconds += outcome.cpu_s
        name = f"the {guide.type} guide"
        if outcome.content is None:
            raise InvalidRequest(f"{name} of {guide.num_bytes} bytes takes more than {outcome.exceeded} to compile")
        trial = msgspec.msgpack.decode(outcome.content, type=Trial)
        if trial.error:
            raise InvalidRequest(f"{name} is malformed: {one_line(trial.error, _MAX_ERROR_CHARS)}")
        return trial
