"""The program of the engine process.

`python -m multilora_engine.process.main` reads one JSON line (`Launch`) on stdin, loads the engine, binds the socket,
and reports on stdout (`Started` or `StartFailed`). It ends when stdin ends, because the front that started it is gone
then. SIGTERM drains it (liveness.py).
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec

from multilora_engine.config import EngineConfig
from multilora_engine.engine.engine import Engine
from multilora_engine.errors import ConfigError, DeviceDead
from multilora_engine.log_lines import configure_logging
from multilora_engine.process.liveness import DrainOrder, Heartbeat
from multilora_engine.process.messages import Launch, Started, StartFailed, report_start, take_stdout
from multilora_engine.process.server import ServedEngine, serve
from multilora_engine.process.telemetry import AdapterUsage

_SWITCH_INTERVAL_S = 0.0005
"""How long a thread that fetches or compiles may hold the interpreter. A step asks for the interpreter many times."""

logger = logging.getLogger(__name__)


def main(create_engine: Callable[[EngineConfig], ServedEngine]) -> None:
    """Run an engine process: read `Launch`, load, report, serve."""
    configure_logging("engine")
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    report_stream = take_stdout()
    launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=Launch)
    try:
        config = EngineConfig.from_parameters(launch.parameters)
        engine = create_engine(config)
    except ConfigError as error:
        report_start(report_stream, StartFailed(str(error)))
        raise SystemExit(1) from None
    except Exception as error:
        logger.exception("the engine cannot start")
        report_start(report_stream, StartFailed(f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from None
    _settle()
    socket_path = Path(launch.socket_path)
    with closing(DrainOrder(socket_path)) as drain, closing(engine):
        signal.signal(signal.SIGTERM, drain.give)
        usage = AdapterUsage()
        heartbeat = Heartbeat(launch.heartbeat_fd, launch.heartbeat_interval_s)
        on_ready = partial(report_start, report_stream, Started())
        try:
            serve(engine, socket_path, sys.stdin.fileno(), usage, heartbeat, drain, on_ready)
        except DeviceDead as error:
            logger.critical("the engine ends: %s", error)
            # At once: whatever else touches the device may wait for it for ever.
            os._exit(1)


def _settle() -> None:
    """Keep all loaded objects out of later garbage collections, which take time between steps and at the end."""
    gc.collect()
    gc.freeze()


def _warm_engine(config: EngineConfig) -> Engine:
    engine = Engine(config)
    engine.warm_up()
    return engine


if __name__ == "__main__":
    main(_warm_engine)
