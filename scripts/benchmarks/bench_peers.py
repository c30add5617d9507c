"""This engine beside others on one machine: the same checkpoint, prompts and adapters, in turn, round after round.

Each engine runs in a process of its own, those of others in environments of their own, which are made at the first
run (gigabytes, and minutes) under --environments. All are loaded at once and answer one after another, so that whatever
else the machine does meets all alike; count on 2 GB of memory an engine for the default model. Answers are greedy, of
one length, and compared with those of transformers and PEFT in float32, which are kept beside the environments, as are
files that engines make of the checkpoint. Takes about a minute a round and engine.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from random import Random
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks.peers.contestants import CONTESTANTS, REFERENCE, Contestant, RunningPeer, engine_version, environment
from benchmarks.peers.exchange import Answer, Case, Job
from benchmarks.peft_baseline import PeftBaseline
from marked_tables import console_table, figure, markdown_table, write_table
from multilora_engine.quickstart.default_model import cache_directory, ensure_default_checkpoint
from plots import PERFORMANCE
from sources import measured_source

TABLE = "peers"
_RANK = 16
_MAX_NUM_SEQS = 16
_NUM_TOKENS = 64
_WARM_UP_TOKENS = 8
_PROMPT_TOKENS = 128
_LONG_PROMPT_TOKENS = 1024
_NUM_LONG_PROMPTS = 4


@dataclass(frozen=True)
class Figures:
    """Medians over rounds.

    tokens_per_s: of all answers together. first_token_ms: of each answer. gap_p99_ms: between neighbouring tokens of an
    answer. num_equal: answers that are the reference's, token for token, of num_answers.
    """

    peer: str
    case: str
    tokens_per_s: float
    first_token_ms: float
    gap_p99_ms: float
    num_equal: int
    num_answers: int

    @classmethod
    def of(cls, peer: str, case: str, answers: Sequence[Answer], expected: Sequence[list[int]]) -> Figures:
        """answers: of each round."""
        return cls(
            peer,
            case,
            statistics.median(sum(map(len, each.tokens)) / max(map(max, each.times)) for each in answers),
            1e3 * statistics.median(times[0] for each in answers for times in each.times),
            1e3 * statistics.median(_gap_p99(each) for each in answers),
            sum(ours == theirs for ours, theirs in zip(answers[-1].tokens, expected, strict=True)),
            len(expected),
        )


def _gap_p99(answer: Answer) -> float:
    gaps = sorted(after - before for times in answer.times for before, after in itertools.pairwise(times))
    return gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))]


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
            for case, peer in itertools.product(cases, peers):
                if not peer.serves(case):
                    continue
                if round_number == 0:
                    peer.answer(replace(case, num_tokens=_WARM_UP_TOKENS))
                else:
                    answers[peer.name, case.name].append(peer.answer(case))
    return [Figures.of(peer, case, each, expected[case]) for (peer, case), each in answers.items()]


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


def rates_table(figures: Sequence[Figures]) -> str:
    """A row an engine, a column a case: tokens/s; and how many answers of all cases are the reference's."""
    cases = list(dict.fromkeys(row.case for row in figures))
    lines = []
    for peer in dict.fromkeys(row.peer for row in figures):
        own = {row.case: row for row in figures if row.peer == peer}
        rates = [figure(own[case].tokens_per_s) if case in own else "–" for case in cases]
        equal, answers = (
            sum(values) for values in zip(*((r.num_equal, r.num_answers) for r in own.values()), strict=True)
        )
        lines.append([peer, *rates, f"{equal} of {answers}"])
    return markdown_table(("tokens a second", *cases, "the same answers"), lines)


def notes(figures: Sequence[Figures], contestants: Sequence[Contestant], versions: Mapping[str, str]) -> list[str]:
    """A line for each engine: its version, and what it could not do; set-ups of one engine share theirs.

    contestants: all that were compared; one without figures could not be installed or started. versions: of
    each contestant's engine, by its name.
    """
    measured = {row.peer for row in figures}
    lines: dict[str, None] = {}
    for contestant in contestants:
        if contestant.name not in measured:
            lines[f"{contestant.name}: left out, it could not be installed or started here."] = None
        elif contestant.engines:
            about = f"; no adapters: {contestant.no_adapters}" if contestant.no_adapters else ""
            lines[f"{contestant.engine}: {versions[contestant.name]}{about}."] = None
    return list(lines)


def write_figures(figures: Sequence[Figures], title: str, output: Path, console: Console) -> None:
    """Print the figures by case, and leave them as `peers.csv` in a folder."""
    ordered = sorted(figures, key=lambda row: row.case)
    cells = [
        (
            f.case,
            f.peer,
            *(f"{each:.0f}" for each in (f.tokens_per_s, f.first_token_ms, f.gap_p99_ms)),
            f"{f.num_equal} of {f.num_answers}",
        )
        for f in ordered
    ]
    columns = ("case", "engine", "tok/s", "first token ms", "gap p99 ms", "equal answers")
    console.print(console_table(columns, cells, title, numbers=range(2, 6)))
    output.mkdir(parents=True, exist_ok=True)
    with (output / "peers.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [each.name for each in fields(Figures)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in figures)


def main(
    output: Annotated[Path, typer.Option(help="Folder for peers.csv.")] = Path("bench_results"),
    model: Annotated[Path | None, typer.Option(help="Checkpoint (default: the default model).")] = None,
    peer: Annotated[list[str] | None, typer.Option(help="Only contestants whose names have this; repeatable.")] = None,
    case: Annotated[list[str] | None, typer.Option(help="Only cases whose names have this; repeatable.")] = None,
    environments: Annotated[Path | None, typer.Option(help="Where the engines of others are installed.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Medians are taken over these.")] = 5,
    update_docs: Annotated[bool, typer.Option("--docs", help="Write the table of docs/performance.md.")] = False,
) -> None:
    source = measured_source() if update_docs else ""
    console = Console()
    checkpoint = model or ensure_default_checkpoint()
    directory = environments or cache_directory() / "peers"
    chosen = [c for c in CONTESTANTS if not peer or any(part in c.name for part in peer)]
    cases = make_cases(_vocab_size(checkpoint), _MAX_NUM_SEQS)
    with tempfile.TemporaryDirectory() as scratch:
        adapters = PeftBaseline(checkpoint, _MAX_NUM_SEQS, _RANK).save(Path(scratch) / "adapters")
        job = Job(
            model=str(checkpoint),
            adapters=[str(adapter) for adapter in adapters],
            rank=_RANK,
            dtype="float32",
            num_threads=torch.get_num_threads(),
            max_num_seqs=_MAX_NUM_SEQS,
            max_model_len=2 * _LONG_PROMPT_TOKENS,
            scratch=scratch,
            converted=str(directory / f"converted-{weights_digest(checkpoint)}"),
        )
        with console.status(f"answers of {REFERENCE.name}"):
            expected = expected_tokens(job, cases, directory)
        cases = [c for c in cases if not case or any(part in c.name for part in case)]
        with running(chosen, job, directory, console) as peers:
            figures = compare(peers, cases, expected, rounds, console)
    title = f"{checkpoint.name}, {_PROMPT_TOKENS} tokens in and {_NUM_TOKENS} out, {torch.get_num_threads()} threads"
    write_figures(figures, title, output, console)
    if update_docs:
        versions = {
            peer.name: engine_version(peer.contestant, environment(peer.contestant, directory)) for peer in peers
        }
        told = "\n".join([source, "", *(f"- {line}" for line in notes(figures, chosen, versions))])
        write_table(PERFORMANCE, TABLE, rates_table(figures), told)


def _vocab_size(checkpoint: Path) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(checkpoint).vocab_size)
