"""`multilora`: generate, stream, chat, upload, convert, quantize, look after adapters, find what is wrong and load a
server from a terminal.

Answers go to standard output, everything else to standard error; an error is one line and exit status 1.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import typer

from multilora_client import adapters_cli, weights_cli
from multilora_client.adapter import Adapter, AdapterTensors
from multilora_client.bench import command as bench_command
from multilora_client.client import DEFAULT_URL, Client
from multilora_client.console import command as console_command
from multilora_client.convert import StorageDtype, convert_peft, is_peft, load_adapter
from multilora_client.doctor import doctor
from multilora_client.doors import DIRECT, ENSEMBLE
from multilora_client.errors import AdapterError, InvalidRequest
from multilora_client.generation import Chunk, Generation
from multilora_client.openai import command as openai_command
from multilora_client.options import DEFAULT_MAX_TOKENS, GenerateOptions, Message
from multilora_client.quantize_command import quantize
from multilora_client.terminal import Url, one_line_errors, progress_bars
from multilora_client.tls import Tls
from multilora_wire.adapter_names import is_plain_name, task_id_of_name

app = typer.Typer(
    help="Talk to a multilora server: one base model, any number of LoRA adapters.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_show_locals=False,
)
app.add_typer(adapters_cli.app, name="adapters")
app.add_typer(weights_cli.app, name="weights")
app.command("openai")(openai_command.openai)
app.command("console")(console_command.console)
app.command("bench")(bench_command.bench)
app.command("quantize")(quantize)
app.command("doctor")(doctor)


DoorName = Literal["direct", "ensemble"]


_REVISION = re.compile("[0-9a-f]{40}")
"""The name of a folder of the Hugging Face cache, which tells no model."""

_OF_A_TRAINER = re.compile(r"checkpoint-\d+|checkpoint|adapter|adapter_model|lora|final|output|out|model")
"""Directories that trainers make: their names do not tell one adapter from another."""

_DOORS = {"direct": DIRECT, "ensemble": ENSEMBLE}

Prompt = Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.", show_default=False)]
Door = Annotated[DoorName, typer.Option(help="Ask the engine's own models, or the ensembles.")]
AdapterDir = Annotated[
    Path | None,
    typer.Option("--adapter", help="Directory of the adapter to use, PEFT or converted.", show_default=False),
]
TaskId = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Task id of the adapter: with --adapter, to send it under instead of a name; alone, that of an adapter "
        "that the server has.",
        show_default=False,
    ),
]
LoraName = Annotated[
    str | None,
    typer.Option(
        "--name",
        "--lora-name",
        help="Name of the adapter: with --adapter, to send it under (default: the directory's); alone, that of an "
        "adapter that the server has, or finds in its sources.",
        show_default=False,
    ),
]
ExpectedDigest = Annotated[
    str | None,
    typer.Option(
        help="Digest that the adapter must have: another version does not answer. `upload` and `adapters list --json` "
        "tell digests.",
        show_default="any version",
    ),
]
LoraStart = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Position in the prompt, in tokens, from which on the adapter computes.",
        show_default="as the adapter was trained",
    ),
]
DecoderText = Annotated[
    str | None,
    typer.Option(
        "--decoder-text",
        help="Beginning of the answer of a model with an encoder, such as T5, which reads the prompt.",
        show_default=False,
    ),
]
AsChat = Annotated[bool, typer.Option("--chat", help="Send the prompt as a chat message of a user.")]
System = Annotated[str | None, typer.Option(help="System message that opens the chat.", show_default=False)]
MaxTokens = Annotated[int, typer.Option(help="Max tokens to generate.")]
Temperature = Annotated[float | None, typer.Option(min=0.0, help="0 is greedy.", show_default="greedy")]
TopK = Annotated[int | None, typer.Option(min=0, help="Sample from the k likeliest tokens; 0 is no limit.")]
TopP = Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Sample from this much probability.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Makes sampling repeatable.")]
StopWords = Annotated[list[str] | None, typer.Option("--stop", help="Text that ends the answer; may be repeated.")]
TimeoutS = Annotated[float | None, typer.Option("--timeout", help="Seconds after which the server gives up.")]
Stats = Annotated[bool, typer.Option("--stats", help="Print token counts and the adapter that answered.")]


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"multilora {version('multilora-client')}")
        raise typer.Exit


@app.callback()
def connect(
    ctx: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    ca: Annotated[
        Path | None,
        typer.Option(
            envvar="MULTILORA_CA",
            help="PEM file of the authorities to trust, for grpcs:// and https://.",
            show_default="this machine's",
        ),
    ] = None,
    client_certificate: Annotated[
        Path | None,
        typer.Option(envvar="MULTILORA_CLIENT_CERTIFICATE", help="PEM file, for servers that ask clients for one."),
    ] = None,
    client_key: Annotated[
        Path | None, typer.Option(envvar="MULTILORA_CLIENT_KEY", help="PEM file: the client certificate's key.")
    ] = None,
) -> None:
    """Keep the settings of the connection, which every command needs, in `ctx.obj`."""
    if ca or client_certificate or client_key:
        with one_line_errors():
            ctx.obj = Tls(ca=ca, certificate=client_certificate, key=client_key)


@app.command()
def generate(
    ctx: typer.Context,
    prompt: Prompt,
    url: Url = DEFAULT_URL,
    door: Door = "direct",
    adapter: AdapterDir = None,
    lora_task_id: TaskId = None,
    lora_name: LoraName = None,
    expected_digest: ExpectedDigest = None,
    lora_start: LoraStart = None,
    decoder_text: DecoderText = None,
    chat: AsChat = False,
    max_tokens: MaxTokens = DEFAULT_MAX_TOKENS,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    stop: StopWords = None,
    timeout: TimeoutS = None,
    stats: Stats = False,
) -> None:
    """Print a whole answer.

    \b
    Examples:
      multilora generate "The capital of France is" --max-tokens 8
      multilora generate --chat "Who are you?" --adapter adapters/pirate
      multilora generate - --lora-task-id 7 < prompt.txt
      multilora generate "Who are you?" --name acme/pirate
    """
    with one_line_errors(), Client(url, door=_DOORS[door], tls=ctx.obj) as client:
        text, messages = _read_prompt(prompt, as_message=chat)
        chosen, lora_name = _choose_adapter(adapter, lora_task_id, lora_name)
        answer = client.generate(
            text,
            messages=messages,
            adapter=chosen,
            lora_name=lora_name,
            lora_expected_digest=expected_digest,
            lora_start=lora_start,
            decoder_text_input=decoder_text,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop_words=stop,
            timeout_s=timeout,
        )
        typer.echo(answer.text)
        _print_stats(stats, answer)
        _explain_silence(answer.text, answer.finish_reason, is_plain=not (chat or stop))


@app.command()
def stream(
    ctx: typer.Context,
    prompt: Prompt,
    url: Url = DEFAULT_URL,
    door: Door = "direct",
    adapter: AdapterDir = None,
    lora_task_id: TaskId = None,
    lora_name: LoraName = None,
    expected_digest: ExpectedDigest = None,
    lora_start: LoraStart = None,
    decoder_text: DecoderText = None,
    chat: AsChat = False,
    max_tokens: MaxTokens = DEFAULT_MAX_TOKENS,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    stop: StopWords = None,
    timeout: TimeoutS = None,
    stats: Stats = False,
) -> None:
    """Print an answer while it is generated. Ctrl-C ends it on the server, too.

    \b
    Examples:
      multilora stream "Once upon a time" --temperature 0.8 --seed 1
      multilora stream --chat "Who are you?" --adapter adapters/pirate --url http://localhost:8000
    """
    with one_line_errors(), Client(url, door=_DOORS[door], tls=ctx.obj) as client:
        text, messages = _read_prompt(prompt, as_message=chat)
        chosen, lora_name = _choose_adapter(adapter, lora_task_id, lora_name)
        chunks = client.stream(
            text,
            messages=messages,
            adapter=chosen,
            lora_name=lora_name,
            lora_expected_digest=expected_digest,
            lora_start=lora_start,
            decoder_text_input=decoder_text,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop_words=stop,
            timeout_s=timeout,
        )
        answer, last = _print_chunks(chunks)
        _print_stats(stats, last)
        _explain_silence(answer, last.finish_reason if last else None, is_plain=not (chat or stop))


@app.command()
def chat(
    ctx: typer.Context,
    url: Url = DEFAULT_URL,
    adapter: AdapterDir = None,
    lora_task_id: TaskId = None,
    lora_name: LoraName = None,
    expected_digest: ExpectedDigest = None,
    system: System = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
) -> None:
    """Chat in the terminal. The model sees the whole conversation; /reset forgets it, Ctrl-D leaves.

    \b
    Example:
      multilora chat --adapter adapters/pirate --system "Be brief."
    """
    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    with one_line_errors(), Client(url, tls=ctx.obj) as client:
        chosen, lora_name = _choose_adapter(adapter, lora_task_id, lora_name)
        options = GenerateOptions(
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            lora_name=lora_name,
            lora_expected_digest=expected_digest,
        )
        _chat(client, chosen, opening, options)


@app.command()
def upload(
    ctx: typer.Context,
    directories: Annotated[list[Path], typer.Argument(help="Adapters, PEFT or converted.", show_default=False)],
    url: Url = DEFAULT_URL,
    lora_task_id: Annotated[
        int | None, typer.Option(min=0, help="Task id in place of a name; for one adapter only.", show_default=False)
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", "--lora-name", help="For one adapter only.", show_default="the directory's or file's name"
        ),
    ] = None,
    expected_digest: Annotated[
        str | None,
        typer.Option(
            help="Digest of the version that it replaces: where the server has another one, or none, nothing changes. "
            "For one adapter only.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Send adapters to the server and print task id, digest, directory and name of each.

    An adapter from a directory whose name says nothing, such as checkpoint-500, has a task id of its content.

    \b
    Examples:
      multilora upload adapters/pirate --lora-task-id 7
      multilora upload adapters/pirate adapters/json
    """
    with one_line_errors(), Client(url, tls=ctx.obj) as client, progress_bars() as progress:
        if (lora_task_id, name, expected_digest) != (None, None, None) and len(directories) > 1:
            raise InvalidRequest(
                "--lora-task-id, --name and --expected-digest are of one adapter; leave them out to upload several"
            )
        for directory in progress.track(directories, description="uploading"):
            adapter, lora_name = _load_named(directory, lora_task_id, name)
            answer = client.upload(adapter, lora_name=lora_name, expected_digest=expected_digest)
            _note_other_model(directory, adapter, client)
            typer.echo(f"{adapter.lora_task_id}\t{answer.lora_digest}\t{directory}\t{lora_name or ''}")


@app.command()
def convert(
    peft_directory: Annotated[Path, typer.Argument(help="PEFT adapter.", show_default=False)],
    output_directory: Annotated[Path, typer.Argument(help="Where the .npy files go.", show_default=False)],
    storage_type: Annotated[
        StorageDtype | None, typer.Option(help="Type of the weights.", show_default="that of the file")
    ] = None,
    base_model: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the base model's checkpoint. DoRA needs it, adapters on experts only its config.json.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Convert a PEFT adapter to model.lora_weights.npy and model.lora_config.npy, as TensorRT-LLM's converter does.

    \b
    Example:
      multilora convert adapters/pirate converted/pirate --storage-type float16
    """
    with one_line_errors(), progress_bars() as progress:
        if is_peft(output_directory):
            raise AdapterError(f"{output_directory} is a PEFT adapter; write into another directory")
        task = progress.add_task("converting", total=None)
        tensors = convert_peft(
            peft_directory,
            storage_type,
            lambda done, total: progress.update(task, completed=done, total=total),
            base_model,
        )
        tensors.save(output_directory)
        typer.echo(f"{output_directory}: {_describe(tensors)}")


def main() -> None:
    """Entry point of the `multilora` command."""
    app()


def _read_prompt(prompt: str, *, as_message: bool) -> tuple[str | None, list[Message] | None]:
    """The prompt as text or as a conversation, the other one None."""
    text = sys.stdin.read() if prompt == "-" else prompt
    return (None, [{"role": "user", "content": text}]) if as_message else (text, None)


def _choose_adapter(
    directory: Path | None, lora_task_id: int | None, lora_name: str | None
) -> tuple[Adapter | int | None, str | None]:
    """The adapter as weights or as an id, and its name. The adapter is None for the base model, and if only the name
    is known."""
    if directory is not None:
        if not directory.exists() and is_plain_name(str(directory)):
            option = "--lora-task-id" if str(directory).isdecimal() else "--name"
            raise AdapterError(f"there is no directory {directory}; for one that the server has: {option} {directory}")
        return _load_named(directory, lora_task_id, lora_name)
    _check_one_of(lora_task_id, lora_name)
    return lora_task_id, lora_name


def _note_other_model(directory: Path, adapter: Adapter, client: Client) -> None:
    """Tell of an adapter that names another base model than the server's. Sides that fit do not prove the weights."""
    trained_on = adapter.content.base_model
    if not trained_on:
        return
    served = client.describe_model().model
    names = [name.rstrip("/").rpartition("/")[2].casefold() for name in (trained_on, served)]
    if _REVISION.fullmatch(served) is None and not (names[0] in names[1] or names[1] in names[0]):
        typer.echo(
            f"note: {directory} names {trained_on[:200]} as its base model, and the server serves {served}, of "
            "the same sizes",
            err=True,
        )


def _load_named(directory: Path, lora_task_id: int | None, lora_name: str | None) -> tuple[Adapter, str | None]:
    """The adapter of a directory, and the name to send it under; None if it has only a task id."""
    _check_one_of(lora_task_id, lora_name)
    if (lora_task_id, lora_name) == (None, None):
        folder = re.sub(r"\.gguf$", "", directory.resolve().name, flags=re.IGNORECASE)
        lora_name = folder if is_plain_name(folder) and not _OF_A_TRAINER.fullmatch(folder) else None
    task_id = lora_task_id if lora_name is None else task_id_of_name(lora_name)
    return load_adapter(directory, task_id), lora_name


def _check_one_of(lora_task_id: int | None, lora_name: str | None) -> None:
    if lora_task_id is not None and lora_name is not None:
        raise InvalidRequest("a name has a task id of its own; give --name or --lora-task-id")


def _print_chunks(chunks: Iterator[Chunk]) -> tuple[str, Chunk | None]:
    """Print chunks as they come. Returns the whole text and the last chunk."""
    text, last = "", None
    for last in chunks:
        text += last.text
        typer.echo(last.text, nl=False)
    typer.echo()
    return text, last


def _chat(client: Client, adapter: Adapter | int | None, opening: list[Message], options: GenerateOptions) -> None:
    history = list(opening)
    while (line := _read_line()) is not None:
        if line == "/reset":
            history = list(opening)
        elif line:
            history.append({"role": "user", "content": line})
            text, _ = _print_chunks(client.stream(adapter=adapter, **(options | {"messages": history})))
            history.append({"role": "assistant", "content": text})


def _read_line() -> str | None:
    """A line of the user, None at the end of input. Only a person at a terminal is asked for it."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    try:
        return input("> " if is_terminal else "").strip()
    except EOFError:
        return None


def _print_stats(wanted: bool, answer: Generation | Chunk | None) -> None:
    if wanted and answer is not None:
        task_id, digest = answer.lora_task_id, answer.lora_digest[:12]
        named = f"{digest}, {answer.lora_name}" if answer.lora_name else digest
        adapter = "base model" if task_id is None else f"LoRA task {task_id} ({named})"
        counts = f"{answer.num_input_tokens} tokens in, {answer.num_output_tokens} out"
        typer.echo(f"{counts}, finish reason {answer.finish_reason}, {adapter}", err=True)


def _explain_silence(text: str, finish_reason: str | None, *, is_plain: bool) -> None:
    """is_plain: sent without the chat template, and with nothing that may end an answer before it begins."""
    if is_plain and not text.strip() and finish_reason == "stop":
        typer.echo(
            "hint: the model ended its answer at once. One that is trained on chats wants its chat template: --chat",
            err=True,
        )


def _describe(tensors: AdapterTensors) -> str:
    ranks = sorted({int(rank) for rank in tensors.config[:, 2]})
    return f"{len(tensors.config)} rows, ranks {ranks}, {tensors.dtype}, {tensors.nbytes / 1e6:.1f} MB"
