"""The command as a user runs it, against a fake Triton on loopback."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from multilora_client import AdapterTensors, load_adapter
from multilora_client.cli import app


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
    result = run(command, "hi", "--url", fake_triton.url, "--adapter", converted, "--lora-task-id", 7, *options)

    _, inputs = fake_triton.received[0]
    assert result.exit_code == 0
    assert inputs["text_input"] == ["hi"]
    assert inputs["stop_words"] == ["a", "b"]
    assert {name: inputs[name].item() for name in ("max_tokens", "temperature", "runtime_top_k", "seed")} == {
        "max_tokens": 5,
        "temperature": 0.5,
        "runtime_top_k": 4,
        "seed": 3,
    }
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


def test_a_name_and_another_choice_of_an_adapter_contradict_each_other(fake_triton: Any) -> None:
    result = run("generate", "hi", "--url", fake_triton.url, "--lora-name", "acme/pirate", "--lora-task-id", 7)

    assert result.exit_code == 1
    assert "leave --adapter and --lora-task-id out" in result.stderr
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


def test_upload_prints_id_and_digest_of_each_adapter(
    fake_triton: Any, converted: Path, save_adapter: Callable[..., Any]
) -> None:
    peft = save_adapter().directory

    result = run("upload", converted, peft, "--url", fake_triton.url)

    lines = [line.split("\t") for line in result.stdout.splitlines()]
    assert result.exit_code == 0
    assert lines == [
        [str(load_adapter(directory).lora_task_id), "ab" * 32, str(directory)] for directory in (converted, peft)
    ]
    assert fake_triton.adapters == {int(line[0]) for line in lines}


def test_one_task_id_cannot_name_two_adapters(fake_triton: Any, converted: Path) -> None:
    result = run("upload", converted, converted, "--lora-task-id", 7, "--url", fake_triton.url)

    assert result.exit_code == 1
    assert result.stderr.startswith("error: [INVALID_ARG] --lora-task-id names one adapter")
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
        (["upload", "no-such-folder"], "error: [INVALID_ADAPTER] no-such-folder is neither a PEFT adapter"),
        (
            ["convert", "no-such-folder", "out"],
            "error: [INVALID_ADAPTER] no-such-folder/adapter_config.json is missing",
        ),
        (["generate", "hi", "--adapter", "no-such-folder"], "error: [INVALID_ADAPTER] no-such-folder is neither"),
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


@pytest.mark.parametrize("command", ["generate", "stream", "chat", "upload", "convert", "openai"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    result = run(command, "--help")

    assert result.exit_code == 0
    assert f"multilora {command}" in result.stdout.partition("Example")[2]
