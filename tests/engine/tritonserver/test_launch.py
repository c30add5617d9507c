"""The command in a process of its own, over two trivial models that stand in for the fronts its probe asks."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import httpx2
import pytest

from multilora_engine.tritonserver.launch import sigterm_as_ctrl_c

COMMAND = [
    sys.executable,
    "-m",
    "multilora_engine.tritonserver.launch",
    "--http-port=0",
    "--grpc-port=0",
    "--metrics-port=0",
]

OURS = f"--model-repository={Path(__file__).parents[3] / 'model_repository'}"

MODEL = """
    import os
    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def initialize(self, args):
            pb_utils.Logger.log_info(f"pid of {args['model_name']}: {os.getpid()}")

        def execute(self, requests):
            text = pb_utils.Tensor("text_output", np.array([[b"Hi"]], dtype=object))
            return [pb_utils.InferenceResponse([text]) for _ in requests]
"""

CONFIG = """
    backend: "python"
    max_batch_size: 64
    input [ {{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }} ]
    input [ {{ name: "{length_name}" data_type: TYPE_INT32 dims: [ 1 ] }} ]
    output [ {{ name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }} ]
    instance_group [ {{ kind: KIND_CPU }} ]
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, length_name in {"generation_unary": "request_output_len", "ensemble": "max_tokens"}.items():
        version = tmp_path / "repository" / name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(textwrap.dedent(MODEL))
        (version.parent / "config.pbtxt").write_text(textwrap.dedent(CONFIG.format(length_name=length_name)))
    return tmp_path / "repository"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@contextmanager
def serving(repository: Path, checkpoint: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [*COMMAND, f"--model={checkpoint}", f"--model-repository={repository}", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


def read_until(process: subprocess.Popen[str], pattern: str) -> list[str]:
    """The log up to the first line that matches `pattern`; fails when it ends before."""
    lines = []
    assert process.stderr is not None
    for line in process.stderr:
        lines.append(line)
        if re.search(pattern, line):
            return lines
    pytest.fail(f"no line matches {pattern!r} in:\n{''.join(lines)}")


def test_it_announces_the_addresses_after_an_inference_and_sigterm_ends_it_with_status_zero_however_often_it_comes(
    repository: Path, checkpoint: Path
) -> None:
    with serving(repository, checkpoint) as process:
        lines = read_until(process, "^ready")
        assert re.match(
            r"ready  HTTP 127\.0\.0\.1:\d+  gRPC 127\.0\.0\.1:\d+  metrics http://127\.0\.0\.1:\d+/metrics ", lines[-1]
        )
        assert not any("NVML" in line or line.startswith("+") for line in lines)
        for _ in range(5):
            process.send_signal(signal.SIGTERM)
        read_until(process, "successfully unloaded 'ensemble'")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 0


def test_a_server_whose_model_died_is_started_again_at_the_same_address_so_often_and_no_more(
    repository: Path, checkpoint: Path
) -> None:
    with serving(repository, checkpoint, "--canary-interval-secs=0.2", "--max-restarts=1") as process:
        addresses = []
        for is_last in (False, True):
            pid = re.search(r"pid of ensemble: (\d+)", read_until(process, "pid of ensemble: ")[-1])
            addresses.append(read_until(process, "^ready")[-1])
            assert pid is not None
            os.kill(int(pid[1]), signal.SIGKILL)
            said = "error:" if is_last else "restarting in 0 s:"
            read_until(process, rf"^{said} the server no longer answers: .*ensemble.* is not healthy")
        process.communicate(timeout=60)
        assert process.returncode == 1
    assert addresses[0] == addresses[1]


def test_a_probe_tells_by_its_status_whether_a_server_answers(repository: Path, checkpoint: Path) -> None:
    with serving(repository, checkpoint) as process:
        port = re.search(r"HTTP 127\.0\.0\.1:(\d+)", read_until(process, "^ready")[-1])
        assert port is not None
        assert probe(f"--http-port={port[1]}").returncode == 0
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert probe(f"--http-port={port[1]}").returncode == 1
    assert "Connection refused" in probe(f"--http-port={port[1]}").stderr
    assert probe("--live", f"--http-port={port[1]}").returncode == 0


def test_without_http_the_server_is_watched_and_probed_over_grpc(repository: Path, checkpoint: Path) -> None:
    with serving(repository, checkpoint, "--no-http", "--canary-interval-secs=0.2") as process:
        lines = read_until(process, "^ready")
        ready = re.fullmatch(r"ready  HTTP off  gRPC \S+:(\d+)  metrics (http://\S+)  .*\n", lines[-1])
        assert ready is not None
        assert not any("Started HTTPService" in line for line in lines)
        assert "nv_inference_request_success" in httpx2.get(ready[2]).text
        assert probe(f"--grpc-port={ready[1]}").returncode == 0
        pid = re.search(r"pid of ensemble: (\d+)", "".join(lines))
        assert pid is not None
        os.kill(int(pid[1]), signal.SIGKILL)
        read_until(process, r"^restarting in 0 s: the server no longer answers: .*ensemble.* is not healthy")


def probe(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND[:3], "probe", *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--model=/nowhere"],
            "error: /nowhere is not there; give the directory of a Hugging Face checkpoint, or a hub id (owner/name)",
        ),
        (["--model=/nowhere/Q4.gguf"], "error: cannot read /nowhere/Q4.gguf: [Errno 2] No such file"),
        ([OURS, "--set", "tokenizer_path=/mödel"], "error: /mödel: Triton's Python backend opens only paths of ASCII"),
        ([OURS, "--set", "api_keys_file=/schlüssel"], "error: /schlüssel: Triton's Python backend opens only paths"),
        ([OURS, "--set", "max_num_seqs=none"], "error: parameter max_num_seqs='none': write a whole number"),
        ([OURS, "--set", "max_lora_rnk=8"], "error: unknown parameter max_lora_rnk, did you mean max_lora_rank"),
        (["--set", "max_loras"], "error: --set max_loras: write --set NAME=VALUE"),
        (["--tritonserver=/nowhere"], "error: /nowhere is not an executable file"),
        (["--model-repository=/nowhere"], "error: no model repository (folders with a config.pbtxt) at /nowhere"),
    ],
)
def test_what_cannot_work_is_one_line_and_status_one(
    checkpoint: Path, repository: Path, arguments: list[str], message: str
) -> None:
    defaults = [f"--model={checkpoint}", f"--model-repository={repository}"]
    result = subprocess.run([*COMMAND, *defaults, *arguments], capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1


def told(*arguments: str) -> tuple[int, str]:
    """Status and all output of the command."""
    command = [sys.executable, "-m", "multilora_engine.tritonserver.launch", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.returncode, done.stdout


def test_help_shows_the_command_as_it_is_typed_and_version_the_package() -> None:
    status, text = told("--help")
    assert status == 0
    assert re.search(r"Usage: python\d* -m multilora_engine.tritonserver.launch +\[OPTIONS\]", " ".join(text.split()))
    assert "…" not in text
    for name in ("--model-repository", "--startup-timeout-secs", "--canary-interval-secs", "--upstream-models"):
        assert f"\n  {name} " in text
    assert told("--version") == (0, f"multilora-serve {version('multilora-engine')}\n")


@pytest.mark.parametrize("url", ["127.0.0.1:1", "http://127.0.0.1:1/"])
def test_a_probe_takes_a_url(url: str) -> None:
    status, text = told("probe", "--url", url)
    assert (status, text.startswith("127.0.0.1:1: ")) == (1, True)


@pytest.mark.parametrize("url", ["https://127.0.0.1:1", "grpc://127.0.0.1:1", "127.0.0.1", "127.0.0.1:1/v2"])
def test_a_probe_refuses_what_is_not_plain_http(url: str) -> None:
    status, text = told("probe", "--url", url)
    assert (status, "--url is" in text) == (2, True)


def test_sigterm_interrupts_what_is_going_on_and_is_itself_again_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), sigterm_as_ctrl_c():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_sigterm_does_not_disturb_what_is_being_closed() -> None:
    closed = []

    def work() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            closed.append(True)

    with pytest.raises(KeyboardInterrupt), sigterm_as_ctrl_c():
        work()
    assert closed
