"""Memory that was freed goes back to Linux: measured in processes of their own, by what Linux counts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_OWN_BYTES = """
def own_bytes():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))
"""


def measured(program: str) -> int:
    done = subprocess.run([sys.executable, "-c", _OWN_BYTES + program], check=True, capture_output=True, text=True)
    return int(done.stdout)


def test_pages_between_memory_that_stays_go_back() -> None:
    """64 MB of which each second piece is freed: none of it lies at the end of the heap."""
    program = """
from multilora_engine.serving.front import give_back_free_memory

pieces = [bytes([7]) * 65_000 for _ in range(1_000)]
del pieces[::2]
given = own_bytes()
give_back_free_memory()
print(given - own_bytes())
"""
    assert measured(program) > 25_000_000


def test_a_models_process_keeps_little_more_of_a_tokenizer_than_its_vocabulary(default_model_dir: Path) -> None:
    """The default model's has 49,152 tokens and as many merges: 14 MB in tokenizers' own library, 52 MB while it is
    read."""
    program = f"""
from pathlib import Path
from types import SimpleNamespace

from transformers import PreTrainedTokenizerFast

from multilora_engine.serving import front

info = SimpleNamespace(tokenizer_path={str(default_model_dir)!r})
front.EngineClient = lambda _: SimpleNamespace(wait_until_ready=lambda _: info)
link = front.EngineLink(Path("socket"))
before = own_bytes()
link.describe()
print(own_bytes() - before)
"""
    assert measured(program) < 30_000_000
