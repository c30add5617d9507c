"""Traces of requests, which tritonserver itself makes and exports: its own `--trace-config`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from multilora_engine.errors import ConfigError
from multilora_engine.tritonserver.installation import has_flag

_FLAG = "--trace-config"


def tracing_arguments(settings: Sequence[str], executable: Path) -> list[str]:
    """Arguments of the server. Raises ConfigError when it was built without tracing."""
    if settings and not has_flag(executable, _FLAG):
        raise ConfigError(f"{_FLAG}: this tritonserver was built without tracing; take another one, or leave it out")
    return [f"{_FLAG}={setting}" for setting in settings]
