"""How near engines come to exact arithmetic: the log-probabilities that they give each token of real text.

All read one checkpoint in bfloat16, and are compared with transformers in float64 on the same weights, so that rounding
the weights, which all share, does not count. Engines are those of `bench_peers`, in the same environments, one after
another. Takes a minute or two an engine.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from benchmarks.bench_peers import converted_folder, running
from benchmarks.peers.accuracy import Nearness, accuracy_table
from benchmarks.peers.contestants import EXACT, FLOATS
from benchmarks.peers.exchange import Job, made
from checkpoints.prepare_default_model import cache_directory, ensure_default_checkpoint
from marked_tables import write_table
from multilora_engine.quantize.text import SAMPLE_TEXT
from plots import DOCS
from repository import REPOSITORY
from sources import measured_source

PAGE = DOCS / "performance.md"
TABLE = "peers accuracy"

TEXTS = (SAMPLE_TEXT, REPOSITORY / "README.md", DOCS / "adapters.md")
_PIECES = 3
"""Of each text."""
_PIECE_TOKENS = 256


def main(
    model: Annotated[Path | None, typer.Option(help="Checkpoint (default: the default model).")] = None,
    peer: Annotated[list[str] | None, typer.Option(help="Only contestants whose names have this; repeatable.")] = None,
    environments: Annotated[Path | None, typer.Option(help="Where the engines of others are installed.")] = None,
    update_docs: Annotated[bool, typer.Option("--docs", help="Write the table of docs/performance.md.")] = False,
) -> None:
    source = measured_source() if update_docs else ""
    console = Console()
    checkpoint = model or ensure_default_checkpoint()
    directory = environments or cache_directory() / "peers"
    converted = converted_folder(checkpoint, directory)
    rounded = made(converted / "bfloat16", lambda folder: save_in_bfloat16(checkpoint, folder))
    texts = [piece for text in TEXTS for piece in token_pieces(checkpoint, text)]
    measured: list[Nearness] = []
    with tempfile.TemporaryDirectory() as scratch:
        job = Job(
            model=str(rounded),
            adapters=[],
            rank=1,
            dtype="float32",
            num_threads=torch.get_num_threads(),
            max_num_seqs=1,
            max_model_len=2 * _PIECE_TOKENS,
            scratch=scratch,
            converted=str(converted_folder(rounded, directory)),
        )
        exact: list[list[float]] = []
        chosen = [c for c in FLOATS if not peer or any(part in c.name for part in peer)]
        for contestant in (EXACT, *chosen):
            with running([contestant], job, directory, console) as peers:
                for each in peers:
                    told = [each.log_probs(text) for text in texts]
                    exact = exact or told
                    measured += [Nearness.of(each.name, told, exact)] if each.contestant != EXACT else []
    table = accuracy_table(measured)
    console.print(table, markup=False)
    if update_docs:
        write_table(PAGE, TABLE, table, source)


def save_in_bfloat16(checkpoint: Path, folder: Path) -> None:
    """The checkpoint with weights rounded to bfloat16, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(folder)


def token_pieces(checkpoint: Path, text: Path) -> list[list[int]]:
    """The first pieces of a text, of one length, without what is left."""
    from transformers import AutoTokenizer

    token_ids = AutoTokenizer.from_pretrained(checkpoint)(text.read_text(), verbose=False)["input_ids"]
    starts = range(0, len(token_ids) - _PIECE_TOKENS + 1, _PIECE_TOKENS)
    return [token_ids[start : start + _PIECE_TOKENS] for start in starts[:_PIECES]]
