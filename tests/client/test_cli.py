"""The command as a user runs it, against a fake Triton on loopback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from typer.main import get_group
from typer.testing import CliRunner, Result

from multilora_client import AdapterTensors, convert_peft, load_adapter
from multilora_client.cli import app
from multilora_wire.adapter_names import task_id_of_name
from multilora_wire.sites import decoder_sites

MODEL = {"model": "acme", "max_model_len": 64, "vocab_size": 11, "version": "1"}


def run(*arguments: object, stdin: str = "") -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


@pytest.fixture
def converted(tmp_path: Path, small_tensors: AdapterTensors) -> Path:
    small_tensors.save(tmp_path / "converted")
    return tmp_path / "converted"


@pytest.mark.parametrize("command", ["generate", "stream"])
def test_the_answer_alone_goes_to_standard_output(fake_triton: Any, command: str) -> None:
    result = run(command, "hi", "--url", fake_triton.url)

    assert (result.exit_code, result.stdout, result.stderr) == (0, "Ahoy, café\n", "")


@pytest.mark.parametrize("command", ["generate", "stream"])
def test_options_reach_the_server(fake_triton: Any, converted: Path, command: str) -> None:
    options = ["--max-tokens", 5, "--temperature", 0.5, "--top-k", 4, "--seed", 3, "--stop", "a", "--stop", "b"]
    options += ["--lora-start", 6, "--decoder-text", "Es war"]
    result = run(command, "hi", "--url", fake_triton.url, "--adapter", converted, "--lora-task-id", 7, *options)

    _, inputs = fake_triton.received[0]
    assert result.exit_code == 0
    assert inputs["text_input"] == ["hi"]
    assert inputs["stop_words"] == ["a", "b"]
    assert inputs["decoder_text_input"] == ["Es war"]
    numbers = {"max_tokens": 5, "temperature": 0.5, "runtime_top_k": 4, "seed": 3, "lora_start": 6}
    assert {name: inputs[name].item() for name in numbers} == numbers
    assert inputs["lora_task_id"].item() == 7
    assert inputs["lora_weights"].shape == (1, 2, 7)


@pytest.mark.parametrize("command", ["generate", "stream", "chat"])
def test_an_adapter_of_the_server_goes_by_its_name(fake_triton: Any, command: str) -> None:
    prompt = [] if command == "chat" else ["hi"]
    result = run(command, *prompt, "--url", fake_triton.url, "--lora-name", "acme/pirate", stdin="hi\n")

    _, inputs = fake_triton.received[0]
    assert result.exit_code == 0
    assert inputs["lora_name"] == ["acme/pirate"]
    assert "lora_task_id" not in inputs


@pytest.mark.parametrize("command", ["generate", "stream", "chat"])
def test_a_request_may_demand_a_version(fake_triton: Any, command: str) -> None:
    prompt, which = [] if command == "chat" else ["hi"], ["--name", "pirate", "--expected-digest", "ab" * 16]
    run(command, *prompt, "--url", fake_triton.url, *which, stdin="hi\n")

    assert fake_triton.received[0][1]["lora_expected_digest"] == ["ab" * 16]


def test_an_upload_may_name_the_version_that_it_replaces(fake_triton: Any, converted: Path) -> None:
    upload = ["upload", converted, "--url", fake_triton.url, "--expected-digest", "ab" * 16]
    run(*upload)

    assert [inputs.get("lora_expected_digest") for _, inputs in fake_triton.received] == [["ab" * 16]]


def test_a_name_and_another_choice_of_an_adapter_contradict_each_other(fake_triton: Any) -> None:
    result = run("generate", "hi", "--url", fake_triton.url, "--name", "acme/pirate", "--lora-task-id", 7)

    assert result.exit_code == 1
    assert "give --name or --lora-task-id" in result.stderr
    assert fake_triton.received == []


def test_the_ensemble_and_the_environment_can_be_chosen(fake_triton: Any) -> None:
    result = CliRunner().invoke(app, ["generate", "hi", "--door", "ensemble"], env={"MULTILORA_URL": fake_triton.url})

    assert result.exit_code == 0
    assert fake_triton.received[0][0] == "ensemble_unary"


def test_a_dash_reads_the_prompt_and_chat_makes_it_a_message(fake_triton: Any) -> None:
    run("generate", "-", "--chat", "--url", fake_triton.url, stdin="¿quién?\n")

    assert fake_triton.received[0][1]["messages"] == ['[{"role": "user", "content": "¿quién?\\n"}]']


def test_stats_tell_which_adapter_answered(fake_triton: Any, converted: Path) -> None:
    result = run("generate", "hi", "--url", fake_triton.url, "--adapter", converted, "--lora-task-id", 7, "--stats")

    assert result.stdout == "Ahoy, café\n"
    assert "finish reason stop, LoRA task 7 (abababababab)" in result.stderr


@pytest.mark.parametrize("command", ["generate", "stream"])
def test_an_empty_answer_to_a_prompt_without_chat_template_says_what_to_try(fake_triton: Any, command: str) -> None:
    fake_triton.words = ("",)
    result = run(command, "hi", "--url", fake_triton.url)
    assert (result.exit_code, result.stdout) == (0, "\n")
    assert result.stderr.startswith("hint: the model ended its answer at once.")
    assert result.stderr.endswith("--chat\n")
    for option in (["--chat"], ["--stop", "x"]):
        assert run(command, "hi", *option, "--url", fake_triton.url).stderr == ""


def test_a_server_goes_by_host_and_port_alone(fake_triton: Any) -> None:
    result = run("generate", "hi", "--url", fake_triton.url.removeprefix("grpc://"))
    assert (result.exit_code, result.stdout) == (0, "Ahoy, café\n")


def test_the_version_is_that_of_the_package() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"multilora {version('multilora-client')}\n")


def test_chat_in_a_pipe_prints_answers_alone(fake_triton: Any) -> None:
    assert run("chat", "--url", fake_triton.url, stdin="one\ntwo\n").stdout == "Ahoy, café\nAhoy, café\n"


def test_chat_remembers_until_reset(fake_triton: Any) -> None:
    result = run("chat", "--url", fake_triton.url, "--system", "Be brief.", stdin="one\n\ntwo\n/reset\nthree\n")

    system, answer = '{"role": "system", "content": "Be brief."}', '{"role": "assistant", "content": "Ahoy, café"}'
    one, two, three = (f'{{"role": "user", "content": "{text}"}}' for text in ("one", "two", "three"))
    assert result.exit_code == 0
    assert [inputs["messages"][0] for _, inputs in fake_triton.received] == [
        f"[{system}, {one}]",
        f"[{system}, {one}, {answer}, {two}]",
        f"[{system}, {three}]",
    ]


def test_upload_sends_each_adapter_by_its_directorys_name(
    fake_triton: Any, converted: Path, save_adapter: Callable[..., Any]
) -> None:
    peft = save_adapter().directory

    result = run("upload", converted, peft, "--url", fake_triton.url)

    lines = [line.split("\t") for line in result.stdout.splitlines()]
    assert result.exit_code == 0
    assert lines == [
        [str(task_id_of_name(directory.name)), "ab" * 32, str(directory), directory.name]
        for directory in (converted, peft)
    ]
    assert fake_triton.adapters == {int(line[0]) for line in lines}
    assert [inputs["lora_name"] for _, inputs in fake_triton.received] == [["converted"], ["peft"]]
    sent = fake_triton.received[1][1]["lora_peft_weights"]
    assert sent.tobytes() == (peft / "adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("file", "name"), [("pirate.gguf", "pirate"), ("pirate-f16.v2.gguf", "pirate-f16.v2"), ("PIRATE.GGUF", "PIRATE")]
)
def test_upload_sends_a_gguf_file_by_its_name_without_the_suffix(
    fake_triton: Any, small_tensors: AdapterTensors, tmp_path: Path, file: str, name: str
) -> None:
    # The folder's content does not matter for its name.
    small_tensors.save(tmp_path / file)
    result = run("upload", tmp_path / file, "--url", fake_triton.url)
    assert result.exit_code == 0, result.output
    assert [inputs["lora_name"] for _, inputs in fake_triton.received] == [[name]]


@pytest.mark.parametrize("folder", ["checkpoint-500", "adapter", "a name", "é"])
def test_a_directory_whose_name_is_none_goes_by_an_id_of_its_content(
    fake_triton: Any, small_tensors: AdapterTensors, tmp_path: Path, folder: str
) -> None:
    small_tensors.save(tmp_path / folder)

    result = run("upload", tmp_path / folder, "--url", fake_triton.url)

    task_id = load_adapter(tmp_path / folder).lora_task_id
    assert result.stdout == f"{task_id}\t{'ab' * 32}\t{tmp_path / folder}\t\n"
    assert "lora_name" not in fake_triton.received[0][1]


@pytest.mark.parametrize(
    ("options", "task_id", "name"),
    [
        ([], task_id_of_name("converted"), "converted"),
        (["--name", "acme/pirate"], task_id_of_name("acme/pirate"), "acme/pirate"),
        (["--lora-task-id", 7], 7, None),
    ],
)
@pytest.mark.parametrize("command", [["upload"], ["generate", "hi", "--adapter"], ["stream", "hi", "--adapter"]])
def test_an_adapter_is_sent_under_the_name_or_the_id_that_was_given(
    fake_triton: Any, converted: Path, command: list[str], options: list[object], task_id: int, name: str | None
) -> None:
    result = run(*command, converted, *options, "--url", fake_triton.url)

    _, inputs = fake_triton.received[0]
    assert result.exit_code == 0
    assert inputs["lora_task_id"].item() == task_id
    assert inputs.get("lora_name") == (None if name is None else [name])
    assert inputs["lora_weights"].shape == (1, 2, 7)


def test_upload_refuses_converted_files_of_another_model(
    fake_triton: Any, save_adapter: Callable[..., Any], tmp_path: Path
) -> None:
    sites = asdict(decoder_sites(2, hidden_size=40, q_size=24, kv_size=4, intermediate_size=40))
    fake_triton.report = {"layout": {"sites": sites}} | MODEL

    convert_peft(save_adapter().directory).save(tmp_path / "converted")
    result = run("upload", tmp_path / "converted", "--url", fake_triton.url)

    assert result.exit_code == 1
    assert (
        "not for acme: model.layers.0.self_attn.q_proj has 24 inputs and 40 outputs there, 40 inputs" in result.stderr
    )
    assert not fake_triton.adapters


@pytest.mark.parametrize(
    ("trained_on", "served", "is_noted"),
    [
        ("acme/other", "tiny", True),
        ("/models/Tiny/", "tiny", False),
        ("acme/tiny-1B", "tiny-1b-float32", False),
        ("acme/other", "0" * 40, False),
        ("", "tiny", False),
    ],
)
def test_upload_tells_of_an_adapter_that_names_another_model(
    fake_triton: Any, save_adapter: Callable[..., Any], trained_on: str, served: str, is_noted: bool
) -> None:
    directory = save_adapter().directory
    config = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": trained_on}))
    fake_triton.report = MODEL | {"model": served}

    result = run("upload", directory, "--url", fake_triton.url)

    assert result.exit_code == 0
    assert (f"names acme/other as its base model, and the server serves {served}" in result.stderr) == is_noted


def test_one_task_id_cannot_name_two_adapters(fake_triton: Any, converted: Path) -> None:
    for option in (["--lora-task-id", 7], ["--name", "pirate"], ["--expected-digest", "ab" * 16]):
        result = run("upload", converted, converted, *option, "--url", fake_triton.url)

        assert result.exit_code == 1
        assert result.stderr.startswith("error: [INVALID_ARG] --lora-task-id, --name and --expected-digest are of")
    assert not fake_triton.received


def test_convert_writes_what_the_library_converts(save_adapter: Callable[..., Any], tmp_path: Path) -> None:
    directory = save_adapter().directory

    result = run("convert", directory, tmp_path / "out", "--storage-type", "bfloat16")

    loaded = AdapterTensors.load(tmp_path / "out")
    assert result.exit_code == 0
    assert result.stdout == f"{tmp_path / 'out'}: 14 rows, ranks [5], BF16, 0.0 MB\n"
    assert (loaded.dtype, loaded.config.shape) == ("BF16", (14, 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "hi", "--url", "grpc://127.0.0.1:1"], "error: [UNAVAILABLE] no server answers at 127.0.0.1:1"),
        (
            ["stream", "hi", "--url", "http://127.0.0.1:1"],
            "error: [UNAVAILABLE] no server answers at http://127.0.0.1:1",
        ),
        (["chat", "--url", "nowhere"], "error: [INVALID_ARG] url is 'nowhere'"),
        (["generate", "hi", "--url", "127.0.0.1:1"], "error: [UNAVAILABLE] no server answers at 127.0.0.1:1"),
        (["upload", "no-such-folder"], "error: [INVALID_ADAPTER] there is no directory no-such-folder"),
        (
            ["convert", "no-such-folder", "out"],
            "error: [INVALID_ADAPTER] no-such-folder: adapter_config.json is missing",
        ),
        (["upload", "/etc"], "error: [INVALID_ADAPTER] /etc is neither a PEFT adapter"),
        (
            ["generate", "hi", "--adapter", "pirate-2"],
            "error: [INVALID_ADAPTER] there is no directory pirate-2; for one that the server has: --name pirate-2",
        ),
        (
            ["stream", "hi", "--adapter", "7"],
            "error: [INVALID_ADAPTER] there is no directory 7; for one that the server has: --lora-task-id 7",
        ),
        (["generate", "hi", "--adapter", "no/such/folder"], "error: [INVALID_ADAPTER] there is no directory no/such"),
        (["generate", "hi", "--url", "http://[::1"], "error: [INVALID_ARG] url is 'http://[::1'"),
        (["generate", "hi", "--url", "grpc://localhost:99999"], "error: [INVALID_ARG] url is 'grpc://localhost:99999'"),
        (["adapters", "list", "--url", "http://:8000"], "error: [INVALID_ARG] url is 'http://:8000'"),
        (["openai", "--url", "x"], "error: [INVALID_ARG] url is 'x'"),
        (["console", "--url", "http://[::1"], "error: [INVALID_ARG] url is 'http://[::1'"),
        (["generate", "hi", "--timeout", "nan"], "error: [INVALID_ARG] timeout_s must be more than 0"),
        (["stream", "hi", "--timeout", "inf"], "error: [INVALID_ARG] timeout_s must be more than 0"),
        (["generate", "hi", "--timeout", "-1"], "error: [INVALID_ARG] timeout_s must be more than 0"),
        (["generate", "hi", "--seed", str(2**64)], f"error: [INVALID_ARG] seed: {2**64} is not in the range of uint64"),
        (["stream", "hi", "--lora-task-id", str(2**64)], f"error: [INVALID_ARG] lora_task_id: {2**64} is not in"),
    ],
)
def test_an_error_is_one_line_on_standard_error_and_exit_status_1(arguments: list[str], message: str) -> None:
    result = run(*arguments, stdin="hi\n")

    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1


def test_an_error_of_the_server_keeps_its_code(fake_triton: Any) -> None:
    result = run("stream", "hi", "--lora-task-id", 9, "--url", fake_triton.url)

    assert result.exit_code == 1
    assert result.stderr.startswith("error: [NOT_FOUND] LoRA task 9 not found in cache.")


def all_commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from all_commands(command, (*path, name))
        else:
            yield (*path, name)


COMMANDS = list(all_commands(get_group(app)))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example_and_cuts_no_name(command: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "80"})

    assert result.exit_code == 0
    assert f"  multilora {' '.join(command)}" in result.stdout.partition("Example")[2]
    assert "…" not in result.stdout


@pytest.mark.parametrize("command", [c for c in COMMANDS if c[0] not in ("convert", "quantize")], ids=" ".join)
def test_every_command_that_asks_a_server_has_its_address_in_one_option(command: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(app, [*command, "--help"]).stdout
    assert re.search("^  --url ", shown, re.MULTILINE)


def test_the_former_name_of_the_address_is_refused_with_the_name_that_it_has() -> None:
    result = run("openai", "--server", "grpc://localhost:8001")
    assert result.exit_code == 2
    assert "the option is --url" in result.stderr


@pytest.mark.parametrize(
    ("code", "text", "remedy"),
    [
        ("UNAUTHENTICATED", "the server has API keys", "set MULTILORA_API_KEY to a key of this server"),
        ("ALREADY_EXISTS", "LoRA task 7 is cached with other weights", "--name OTHER"),
        (
            "NOT_FOUND",
            "LoRA task 7 not found in cache. Please send LoRA weights with request",
            "`multilora upload DIR` sends them",
        ),
        (
            "INVALID_ARG",
            "this model has no chat template; send text_input instead of messages",
            "`multilora generate` without --chat",
        ),
    ],
)
def test_an_error_of_the_server_ends_with_what_to_do_here(fake_triton: Any, code: str, text: str, remedy: str) -> None:
    fake_triton.refusal = f"[{code}] {text} (request r1)"
    result = run("stream", "hi", "--chat", "--url", fake_triton.url)
    assert result.stderr.startswith(f"error: [{code}] {text}; ")
    assert remedy in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("key", ["two\nlines", "schlüssel"])
def test_an_api_key_that_no_header_carries_is_refused_in_one_line(fake_triton: Any, key: str) -> None:
    result = CliRunner().invoke(app, ["generate", "hi", "--url", fake_triton.url], env={"MULTILORA_API_KEY": key})
    assert result.stderr.startswith("error: [INVALID_ARG] the API key has")
    assert result.stderr.count("\n") == 1


def test_addresses_of_the_other_protocol_are_told_by_their_scheme(fake_triton: Any) -> None:
    grpc_port = fake_triton.url.rpartition(":")[2]
    result = run("generate", "hi", "--url", f"http://127.0.0.1:{grpc_port}")
    assert result.stderr.startswith("error: [UNAVAILABLE] what listens at")
    assert "gRPC port, write grpc://" in result.stderr
    with http_server() as http_port:
        result = run("generate", "hi", "--url", f"grpc://127.0.0.1:{http_port}")
    assert f"HTTP port, write http://127.0.0.1:{http_port}" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [["stream", "hi"], ["generate", "hi"], ["upload", "{adapter}"]], ids=" ".join)
def test_output_that_nobody_reads_ends_a_command_without_a_word(
    fake_triton: Any, converted: Path, command: list[str]
) -> None:
    fake_triton.words = ("more ",) * 20_000
    arguments = [part.format(adapter=converted) for part in command]
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as nobody:
        result = subprocess.run(
            [Path(sys.executable).with_name("multilora"), *arguments, "--url", fake_triton.url],
            stdout=nobody,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert result.stderr == ""


@contextmanager
def http_server() -> Iterator[int]:
    """The port of a server that speaks HTTP/1 alone."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Standard error is the command's."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()
