"""Starts a server, asks the base model and sample adapters the same question at once, and shows the answers side by
side. An activated adapter then names the style of each answer. It ends with the error of a client that asks for an
adapter the server does not have.
"""

import asyncio
import fcntl
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from multilora_client import Adapter, AsyncClient, Client, Message, MultiloraClientError, load_adapter
from multilora_client.terminal import one_line_errors
from multilora_engine.errors import ConfigError
from multilora_engine.models.registry import read_model_config
from multilora_engine.quickstart.default_model import cache_directory, ensure_default_checkpoint
from multilora_engine.quickstart.machine_room import check_memory
from multilora_engine.quickstart.quantized_default_model import SchemeName, ensure_quantized_checkpoint
from multilora_engine.quickstart.samples import JUDGE, STYLES, judged_conversation, sample_directory, sample_rank
from multilora_engine.text.tokenizer_files import read_tokenizer
from multilora_engine.tritonserver import ServerOptions, ServerProcess
from multilora_engine.tritonserver.arguments import PortTaken, resolve_addresses
from multilora_engine.tritonserver.checkpoint import check_stub_opens, resolve_checkpoint
from multilora_engine.tritonserver.launch import (
    announce,
    console,
    errors_as_one_line,
    sigterm_as_ctrl_c,
    wait_ready,
    watch,
)
from multilora_kernels.cpu.build import needs_compiler
from multilora_wire.adapter_names import task_id_of_name
from multilora_wire.adapter_origin import WrongBaseModel
from multilora_wire.end_with_parent import end_with_parent
from multilora_wire.peft_files import open_peft_directory

DEFAULT_PROMPT = "What do bees make?"
MAX_TOKENS = 48
MAX_VERDICT_TOKENS = 8
MISSING_TASK_ID = 404
CANARY_INTERVAL_S = 15.0
NEEDED_MEMORY_BYTES = 3 << 30
"""Of a server of the default model, its adapters and this program."""

NO_COMPILER = (
    "[yellow]No C++ compiler:[/] plain PyTorch computes the answers, which takes longer; on Debian and Ubuntu: "
    "apt-get install g++"
)

answers = Console(highlight=False, emoji=False)
"""The answers go to stdout, reports of progress to stderr."""


@dataclass
class Column:
    """One answer of the table, while it grows."""

    title: str
    adapter: Adapter | None
    text: str = ""
    num_tokens: int = 0
    seconds: float = 0.0
    verdict: str = ""

    @property
    def rate(self) -> str:
        return f"{self.num_tokens / self.seconds:.1f} tokens/s" if self.seconds else ""


@dataclass(frozen=True)
class Question:
    """The question to all. is_chat: whether the model has a chat template."""

    text: str
    is_chat: bool

    @property
    def prompt(self) -> str | None:
        return None if self.is_chat else self.text

    @property
    def messages(self) -> list[Message] | None:
        return [{"role": "user", "content": self.text}] if self.is_chat else None

    @property
    def json_fields(self) -> dict[str, object]:
        """The same at HTTP's `generate`."""
        return {"messages": json.dumps(self.messages)} if self.is_chat else {"text_input": self.text}


def main(
    once: Annotated[bool, typer.Option("--once", help="Stop the server after the answers.")] = False,
    model: Annotated[
        str | None, typer.Option(metavar="DIR_OR_HF_ID", help="Serve this checkpoint instead of the default model.")
    ] = None,
    quantize: Annotated[
        SchemeName | None,
        typer.Option(help="Serve the default model in 4 or 8 bits, quantised on first use.", show_default="float32"),
    ] = None,
    prompt: Annotated[str, typer.Option(help="The question.")] = DEFAULT_PROMPT,
    free_ports: Annotated[
        bool, typer.Option("--free-ports", help="Listen on any free ports instead of 8000, 8001 and 8002.")
    ] = False,
) -> None:
    """Serve a model, and show sample LoRA adapters answering together with it in one batch."""
    if model and quantize:
        raise typer.BadParameter(
            "--quantize is for the default model; make another one with `multilora quantize` first"
        )
    with errors_as_one_line(), one_line_errors(), sigterm_as_ctrl_c(), ExitStack() as resources:
        check_machine(is_default_model=model is None, free_ports=free_ports)
        checkpoint = choose_checkpoint(model, quantize)
        question = Question(prompt, is_chat=read_tokenizer(checkpoint).has_chats)
        log = resources.enter_context(open_log(cache_directory()))
        server = resources.enter_context(
            ServerProcess(server_options(checkpoint, free_ports), on_log=lambda line: print(line, file=log))
        )
        console.print(f"server log: {log.name}")
        wait_ready(server)
        adapters = sample_adapters(checkpoint)
        demonstrate(server, question, adapters)
        if not once:
            show_curl(server, question, next((name for name in STYLES if name in adapters), None))
            announce(server)
            with suppress(KeyboardInterrupt), web_console(server, free_ports):
                watch(server, CANARY_INTERVAL_S)
            console.print("stopping; Ctrl-C again ends it at once")


def open_log(folder: Path) -> TextIO:
    """An empty quickstart.log in `folder`, or one with a number where another quickstart writes that one."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        log = (folder / ("quickstart.log" if number == 1 else f"quickstart-{number}.log")).open("a", buffering=1)
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.close()
        else:
            log.truncate(0)
            break
    return log


def check_machine(is_default_model: bool, free_ports: bool) -> None:
    """Say what would fail later, or be slow, before anything is downloaded. Raises ConfigError."""
    if is_default_model:
        check_cache()
    if not free_ports:
        check_ports()
    if is_default_model:
        check_memory(NEEDED_MEMORY_BYTES, "a server of the small model")
    if needs_compiler():
        console.print(NO_COMPILER, soft_wrap=True)


def check_cache() -> None:
    """Raises ConfigError when the server could not open a model in the cache."""
    try:
        check_stub_opens(str(cache_directory()))
    except ConfigError as error:
        raise ConfigError(f"{error}; here: set MULTILORA_CACHE") from None


def check_ports() -> None:
    """Raises ConfigError when one of the default ports is taken."""
    options = ServerOptions(model=Path())
    try:
        resolve_addresses(options.host, options.http_port, options.grpc_port, options.metrics_port)
    except PortTaken as error:
        raise ConfigError(f"{error.taken}; --free-ports takes any free ones") from None


@contextmanager
def web_console(server: ServerProcess, free_ports: bool) -> Iterator[None]:
    """`multilora console` beside the server: it says where its page is, or why it cannot be."""
    command = [str(Path(sys.executable).with_name("multilora")), "console", f"--url=grpc://{server.grpc_url}"]
    command += [f"--http-url=http://{server.http_url}", *(["--port=0"] if free_ports else [])]
    with subprocess.Popen(end_with_parent(command), stdin=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.terminate()


def choose_checkpoint(model: str | None, scheme: SchemeName | None) -> Path:
    if model:
        return resolve_checkpoint(model)
    return ensure_quantized_checkpoint(scheme) if scheme else ensure_default_checkpoint()


def server_options(checkpoint: Path, free_ports: bool) -> ServerOptions:
    if free_ports:
        return ServerOptions(model=checkpoint, http_port=0, grpc_port=0, metrics_port=0)
    return ServerOptions(model=checkpoint)


def sample_adapters(checkpoint: Path) -> dict[str, Adapter]:
    """The sample adapters by name, none when they do not fit the model of `checkpoint`."""
    adapters = {}
    for name in (*STYLES, JUDGE):
        if reason := misfit(sample_directory(name), checkpoint):
            console.print(f"[yellow]No sample adapters:[/] {reason}. Only the base model answers.", soft_wrap=True)
            return {}
        adapters[name] = load_adapter(sample_directory(name), task_id_of_name(name))
    return adapters


def misfit(adapter_directory: Path, checkpoint: Path) -> str | None:
    """Why an adapter was not made for the model of `checkpoint`; None when it fits."""
    try:
        with open_peft_directory(adapter_directory, read_model_config(checkpoint, "auto").sites, checkpoint.name):
            return None
    except WrongBaseModel as error:
        return str(error)


def demonstrate(server: ServerProcess, question: Question, adapters: dict[str, Adapter]) -> None:
    """All answers at once, then the error of a missing adapter."""
    answers.print(Text(f"\n{question.text}", "bold"))
    styles = {name: adapter for name, adapter in adapters.items() if name in STYLES}
    titles = {name: f"{name} (rank {sample_rank(name)})" for name in styles}
    columns = [Column("base model", None), *(Column(titles[name], adapter) for name, adapter in styles.items())]
    asyncio.run(warm_up(server, question, adapters))
    seconds = asyncio.run(ask_all(server, question, columns))
    if question.is_chat and JUDGE in adapters:
        asyncio.run(judge_all(server, question, columns, adapters[JUDGE]))
    answers.print(as_table(columns))
    num_tokens = sum(column.num_tokens for column in columns)
    answers.print(f"{len(columns)} in one batch: {num_tokens / seconds:.1f} tokens/s in total")
    show_missing_adapter(server, question)


async def warm_up(server: ServerProcess, question: Question, adapters: Mapping[str, Adapter]) -> None:
    """Upload the adapters by their names, and get a token of each that answers any question.

    A model's process loads libraries for its first chat and its first adapter, which takes seconds: the rates that are
    shown are those of all later requests.
    """
    async with AsyncClient(f"grpc://{server.grpc_url}") as client:
        for name, adapter in adapters.items():
            await client.upload(adapter, lora_name=name)
        for asked in (None, *(adapter for name, adapter in adapters.items() if name in STYLES)):
            async for _ in client.stream(question.prompt, messages=question.messages, adapter=asked, max_tokens=1):
                pass


async def ask_all(server: ServerProcess, question: Question, columns: Sequence[Column]) -> float:
    """Fill all columns concurrently, showing them as they grow; returns the seconds it took."""
    start = time.perf_counter()
    with Live(console=answers, auto_refresh=False, transient=True) as live:
        async with AsyncClient(f"grpc://{server.grpc_url}") as client:
            show = partial(live.update, refresh=True)
            await asyncio.gather(
                *(ask(client, question, column, lambda: show(as_table(columns))) for column in columns)
            )
    return time.perf_counter() - start


async def ask(client: AsyncClient, question: Question, column: Column, on_change: Callable[[], None]) -> None:
    start = time.perf_counter()
    async for chunk in client.stream(
        question.prompt, messages=question.messages, adapter=column.adapter, max_tokens=MAX_TOKENS
    ):
        column.text += chunk.text
        column.num_tokens = chunk.num_output_tokens or column.num_tokens
        column.seconds = time.perf_counter() - start
        on_change()


async def judge_all(server: ServerProcess, question: Question, columns: Sequence[Column], judge: Adapter) -> None:
    """Fill in the judge's verdicts on all answers, and how much of each conversation the base had computed before."""
    async with AsyncClient(f"grpc://{server.grpc_url}") as client:
        for column in columns:
            turns = judged_conversation(question.text, column.text)
            messages: list[Message] = [{"role": turn["role"], "content": turn["content"]} for turn in turns]
            verdict = await client.generate(messages=messages, adapter=judge, max_tokens=MAX_VERDICT_TOKENS)
            cached = f"{verdict.num_cached_tokens} of {verdict.num_input_tokens} tokens cached"
            column.verdict = f"{JUDGE}: {verdict.text} ({cached})"


def as_table(columns: Sequence[Column]) -> Table:
    table = Table(expand=True, show_footer=True)
    for column in columns:
        table.add_column(Text(column.title), Text(column.rate), ratio=1)
    table.add_row(*(Text(column.text) for column in columns), end_section=True)
    if any(column.verdict for column in columns):
        table.add_row(*(Text(column.verdict, "italic") for column in columns))
    return table


def show_missing_adapter(server: ServerProcess, question: Question) -> None:
    """A task id that was never sent is an error, never an answer of the base model."""
    answers.print(f"\nA request with [bold]lora_task_id {MISSING_TASK_ID}[/], which nobody has sent, gets:")
    with Client(f"grpc://{server.grpc_url}") as client:
        try:
            client.generate(question.prompt, messages=question.messages, adapter=MISSING_TASK_ID, max_tokens=1)
        except MultiloraClientError as error:
            answers.print(Text(f"{error.code}: {error}", "red"), soft_wrap=True)


def show_curl(server: ServerProcess, question: Question, name: str | None) -> None:
    """The same request from a shell; an adapter that was sent once is asked for by its name."""
    request = {
        **question.json_fields,
        "max_tokens": MAX_TOKENS,
        "exclude_input_in_output": True,
        **({"lora_name": name} if name else {}),
    }
    url = f"http://{server.http_url}/v2/models/generation_unary/generate"
    answers.print("\nFrom a shell:")
    answers.print(f"curl -s {url} -d {shlex.quote(json.dumps(request))}", markup=False, soft_wrap=True)


def run() -> None:
    """Entry point of `multilora-quickstart`."""
    typer.run(main)


if __name__ == "__main__":
    run()
