"""`multilora doctor`: looks at this machine, at a server and at an adapter, and says what works and what does not.

Each check reads facts that the system tells at once. No check changes anything, needs the network beyond the server's
address, or imports torch.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal

import typer

from multilora_client.adapter import AdapterTensors, check_origin
from multilora_client.client import DEFAULT_URL, Client
from multilora_client.convert import load_content
from multilora_client.errors import MultiloraClientError
from multilora_client.terminal import Url
from multilora_client.tls import Tls
from multilora_wire.adapter_origin import WrongBaseModel
from multilora_wire.layout import AdapterLayout
from multilora_wire.peft_config import PeftError, SitesMissing
from multilora_wire.peft_files import PeftAdapter, open_peft_directory

Verdict = Literal["works", "note", "fault"]
"""works: nothing to do. note: slower or less than it could be. fault: something does not work before it is mended."""

_PACKAGES = ("multilora-client", "multilora-kernels", "multilora-engine")
_SERVER_PORTS = {8000: "HTTP", 8001: "gRPC", 8002: "metrics", 9000: "the OpenAI front"}

_VECTORS = (
    ({"amx_tile", "amx_bf16"}, "a matrix unit (AMX) for bfloat16"),
    ({"avx512f", "avx512bw", "avx512vl", "avx512_bf16"}, "AVX-512 with bfloat16"),
    ({"avx512f", "avx512bw", "avx512vl"}, "AVX-512"),
    ({"avx2", "fma", "f16c"}, "AVX2"),
)
"""What the compiled operators look for, best first, by the flags of /proc/cpuinfo."""

_LEAST_MEMORY_BYTES = 2 << 30
"""The default model with its server, a console and some adapters take less."""

_LEAST_DISK_BYTES = 3 << 30
"""An environment with PyTorch for CPUs, the server and the default model."""

_LEAST_SHARED_MEMORY_BYTES = 256 << 20
"""Regions of the server's processes, and an adapter of some size."""

_SHARED_MEMORY = Path("/dev/shm")
_CONNECT_TIMEOUT_S = 0.5


@dataclass(frozen=True)
class Finding:
    """What one check found, in a sentence. advice: what to do, empty where there is nothing to do."""

    verdict: Verdict
    text: str
    advice: str = ""


def doctor(
    ctx: typer.Context,
    directory: Annotated[
        Path | None, typer.Argument(help="An adapter, PEFT or converted, to look at, too.", show_default=False)
    ] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Say in sentences what works on this machine, what does not, and what to do.

    Looks at the processor, memory, disk, compiler, versions and ports, at the server of --url if one runs, and at the
    adapter in DIRECTORY. Ends with status 1 if something does not work.

    \b
    Examples:
      multilora doctor
      multilora doctor adapters/pirate --url grpc://gpu-box:8001
    """
    findings = [*look_at_machine(), *look_at_packages()]
    server = look_at_server(url, ctx.obj)
    findings += [*server.findings, *look_at_ports(is_served=server.layout is not None)]
    if directory is not None:
        findings += look_at_adapter(directory, server.layout, server.model)
    for finding in findings:
        typer.echo(f"{finding.verdict:6}{finding.text}{finding.advice and f'. {finding.advice}'}")
    if any(finding.verdict == "fault" for finding in findings):
        raise typer.Exit(1)


def look_at_machine() -> Iterator[Finding]:
    """Processor, memory, disk, shared memory, compiler and graphics processors."""
    yield _look_at_processor(_processor_flags(), len(os.sched_getaffinity(0)))
    yield _look_at_memory(_available_memory())
    yield _look_at_disk()
    if _SHARED_MEMORY.is_dir():
        yield _look_at_shared_memory(shutil.disk_usage(_SHARED_MEMORY).free)
    yield _look_at_compiler()
    if graphics := _graphics_processors():
        yield Finding("works", f"Graphics processors: {graphics}")


def look_at_packages() -> Iterator[Finding]:
    """The versions of multilora's packages, and whether their requirements are there."""
    found = {package: found for package in _PACKAGES if (found := _version_of(package))}
    python = ".".join(map(str, sys.version_info[:3]))
    yield Finding("works", f"Python {python}; {', '.join(f'{name} {number}' for name, number in found.items())}")
    if len(set(found.values())) > 1:
        yield Finding("fault", "These packages have different versions", "Install all of them from one release")
    if "multilora-engine" not in found:
        yield Finding("note", "The engine is not installed, so this machine can be a client and no server")
    yield from _unmet_requirements()


@dataclass(frozen=True)
class ServerFindings:
    """What a server's address answers. layout: of its adapters, None where no server of ours answers. model: its
    name.
    """

    findings: tuple[Finding, ...]
    layout: AdapterLayout | None = None
    model: str = ""


def look_at_server(url: str, tls: Tls | None) -> ServerFindings:
    """Whether a server of ours answers, and which model it serves."""
    try:
        with Client(url, tls=tls) as client:
            info, layout = client.describe_model(), client.adapter_layout()
            num_adapters = len(client.list_adapters())
    except (MultiloraClientError, OSError) as error:
        text = f"No server of multilora answers at {url}: {' '.join(str(error).split())}"
        return ServerFindings((Finding("note", text, "Start one with multilora-serve --model DIR, or give --url"),))
    served = f"The server at {url} serves {info.model} (up to {info.max_model_len} tokens), {num_adapters} adapters"
    findings = [Finding("works", served)]
    mine = _version_of("multilora-client")
    if info.version != mine:
        findings.append(
            Finding("note", f"The server has version {info.version} and this client {mine}", "Use equal versions")
        )
    return ServerFindings(tuple(findings), layout, info.model)


def look_at_ports(is_served: bool) -> Iterator[Finding]:
    """Whether a server could listen at its usual ports. is_served: a server of ours answers already."""
    taken = {port: purpose for port, purpose in _SERVER_PORTS.items() if _answers(port)}
    if not taken:
        yield Finding("works", f"Ports {', '.join(map(str, _SERVER_PORTS))} of this machine are free")
    elif is_served:
        yield Finding("works", f"Programs listen at ports {', '.join(map(str, taken))} of this machine")
    else:
        names = ", ".join(f"{port} ({purpose})" for port, purpose in taken.items())
        yield Finding(
            "note",
            f"Other programs listen at ports {names}",
            "Give multilora-serve other ports: --http-port, --grpc-port, --metrics-port, or --free-ports",
        )


def look_at_adapter(directory: Path, layout: AdapterLayout | None, model: str) -> Iterator[Finding]:
    """Whether the adapter in a directory can be read, and whether it fits the server's model, if that is known."""
    try:
        content = load_content(directory)
        if isinstance(content, AdapterTensors):
            if layout is not None and content.origin is not None:
                check_origin(content.origin, layout.sites, model)
            described, rank = _described_tensors(content), int(content.config[:, 2].max())
        else:
            sites = None if layout is None else layout.sites
            with open_peft_directory(directory, sites, model, trusts_patterns=True) as adapter:
                described, rank = _described_peft(adapter), _largest_rank(adapter)
    except SitesMissing:
        yield Finding("note", f"The adapter {directory} cannot be read without a server", "Start one, or give --url")
        return
    except (MultiloraClientError, PeftError, WrongBaseModel, OSError) as error:
        yield Finding("fault", f"The adapter {directory} cannot be served: {' '.join(str(error).split())}")
        return
    yield Finding("works", f"The adapter {directory} can be read: {described}")
    if layout is None:
        yield Finding("note", "Whether the adapter fits is not known without a server", "Start one, or give --url")
    elif rank > layout.max_rank:
        text = f"The adapter has rank {rank}, and the server takes {layout.max_rank} at most"
        yield Finding("fault", text, f"Start the server with --max-lora-rank {rank}")
    else:
        yield Finding("works", f"The adapter fits {model}")


def _described_tensors(content: AdapterTensors) -> str:
    ranks = sorted({int(rank) for rank in content.config[:, 2]})
    return f"converted, {len(content.config)} rows, ranks {ranks}, {content.nbytes / 1e6:.1f} MB"


def _described_peft(adapter: PeftAdapter) -> str:
    ranks = sorted({linear.rank for linear in (*adapter.linears, *adapter.outer)})
    modules = dict.fromkeys(linear.name.rpartition(".")[2] for linear in (*adapter.linears, *adapter.outer))
    rows = f", rows of tokens on {', '.join(rows.base_name for rows in adapter.rows)}" if adapter.rows else ""
    base = f", made for {adapter.base_model[:200]}" if adapter.base_model else ""
    return f"PEFT, {len(adapter.linears)} linears ({', '.join(modules)}), ranks {ranks}{rows}{base}"


def _largest_rank(adapter: PeftAdapter) -> int:
    return max((linear.rank for linear in (*adapter.linears, *adapter.outer)), default=0)


def _look_at_processor(flags: frozenset[str], num_cores: int) -> Finding:
    cores = f"{num_cores} core{'s' if num_cores > 1 else ''}"
    best = next((words for needed, words in _VECTORS if needed <= flags), None)
    if best is None:
        text = f"The processor has {cores} and none of the vector units that the operators use"
        return Finding("note", text, "Answers are right, and many times slower than with AVX2")
    return Finding("works", f"The processor has {cores} and {best}")


def _look_at_memory(available_bytes: int) -> Finding:
    text = f"{available_bytes / 2**30:.1f} GiB of memory are available"
    if available_bytes < _LEAST_MEMORY_BYTES:
        return Finding("fault", text, f"A server of a small model needs {_LEAST_MEMORY_BYTES >> 30} GiB")
    return Finding("works", text)


def _look_at_disk() -> Finding:
    places = [Path(tempfile.gettempdir()), Path.home()]
    free = {place: shutil.disk_usage(place).free for place in places if place.is_dir()}
    text = ", ".join(f"{num_bytes / 2**30:.1f} GiB in {place}" for place, num_bytes in free.items())
    if min(free.values(), default=0) < _LEAST_DISK_BYTES:
        return Finding("note", f"Free on disk: {text}", f"Setting up a server takes {_LEAST_DISK_BYTES >> 30} GiB")
    return Finding("works", f"Free on disk: {text}")


def _look_at_shared_memory(free_bytes: int) -> Finding:
    text = f"{_SHARED_MEMORY} has {free_bytes >> 20} MiB free, through which requests and adapters go"
    if free_bytes < _LEAST_SHARED_MEMORY_BYTES:
        return Finding("fault", text, "In a container give --shm-size=1g, or more")
    return Finding("works", text)


def _look_at_compiler() -> Finding:
    compiler = os.environ.get("CXX") or "c++"
    if shutil.which(compiler.split()[0]) is None:
        text = f"There is no C++ compiler ({compiler})"
        return Finding("note", text, "Install one (apt-get install g++) unless the operators were built before")
    return Finding("works", f"The C++ compiler {compiler} is there")


def _processor_flags() -> frozenset[str]:
    """Empty where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return frozenset(flags.split())


def _available_memory() -> int:
    """Bytes that programs may take: of the machine, or of the container where that is less."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    available = int(fields["MemAvailable"].split()[0]) << 10
    limit, used = (_number_in(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    return available if limit is None or used is None else min(available, max(0, limit - used))


def _number_in(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _graphics_processors() -> str:
    """Their names, as NVIDIA's tool tells them; empty where there is none."""
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return "; ".join(done.stdout.strip().splitlines()) if done.returncode == 0 else ""


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _unmet_requirements() -> Iterator[Finding]:
    """What pip finds missing or of a wrong version for our packages."""
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    if "No module named pip" in done.stderr:
        yield Finding("note", "This environment has no pip, which compares versions with requirements")
        return
    for line in done.stdout.splitlines():
        if line.startswith("multilora"):
            yield Finding("fault", line, "Install the packages again, with their requirements")


def _answers(port: int) -> bool:
    """Whether a program listens at a port of this machine."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=_CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False
