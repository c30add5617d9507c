"""The sample adapters, which lie in `adapters/` of a clone, or in the package of a wheel."""

from __future__ import annotations

import json
from pathlib import Path

import multilora_engine

STYLES = ("pirate", "json", "emoji")
"""The adapters that answer any question, each in its style."""
JUDGE = "judge"
"""The activated adapter that names the style of an answer."""
JUDGE_INVOCATION = "Style of the answer?"
"""The text of the user's turn from which on the judge counts."""


def sample_directory(name: str) -> Path:
    """The PEFT directory of a sample. An activated adapter lies apart: it refuses requests that do not invoke it."""
    package = Path(multilora_engine.__file__).parent
    clone, wheel = (folder / "adapters" for folder in (package.parents[1], package))
    return (clone if clone.is_dir() else wheel) / ("activated" if name == JUDGE else "") / name


def sample_rank(name: str) -> int:
    """The rank in the sample's configuration."""
    return int(json.loads((sample_directory(name) / "adapter_config.json").read_text())["r"])


def judged_conversation(question: str, answer: str) -> list[dict[str, str]]:
    """A question and its answer, and the turn that invokes the judge."""
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": JUDGE_INVOCATION},
    ]
