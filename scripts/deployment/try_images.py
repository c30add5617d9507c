"""Carries out the Dockerfiles without a container engine, and serves from the results.

Each stage starts from a clean Debian, made by debootstrap, in place of the image that FROM names; the instructions run
in it through chroot. Then the entry point runs as the image's user in namespaces of its own, with a read-only root,
until the health check passes. A client asks with a sample adapter, and SIGTERM ends it.

The GPU recipe gets the PyPI server at the place where NVIDIA's image has its own, and serves on the CPU: its steps are
tried, its GPU is not. The proxy runs without a server behind it. Needs root rights and Debian's debootstrap, iproute2
and util-linux, some minutes and 10 GB.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Self

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from checkpoints.prepare_default_model import ensure_default_checkpoint
from deployment.clean_root import Image, Instruction, Recipe, RecipeError, make_base, read_dockerfile, require_tools
from repository import REPOSITORY
from servers.started_server import sigterm_as_ctrl_c

_READY_TIMEOUT_S = 300.0
_EXIT_TIMEOUT_S = 60.0
_SHM_SIZE = "1g"
_QUESTION = [
    "multilora",
    "generate",
    "--chat",
    "What do bees make?",
    "--adapter",
    "/adapters/json",
    "--max-tokens",
    "24",
]

console = Console(highlight=False)


@dataclass
class Trial:
    """The trials of one recipe, and their results."""

    recipe: str
    findings: list[tuple[str, str]] = field(default_factory=list)

    def note(self, tried: str, outcome: str) -> None:
        self.findings.append((tried, outcome))
        console.print(f"  {tried}: {escape(outcome)}")


def main(
    recipes: Annotated[list[str] | None, typer.Argument(metavar="[cpu|gpu|proxy]...", help="Default: all.")] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Keep the roots here, and the base for the next time (default: a temporary one)."),
    ] = None,
) -> None:
    """Carry out the Dockerfiles in clean roots, start their commands, and send them a request."""
    with sigterm_as_ctrl_c(), tempfile.TemporaryDirectory(prefix="multilora-images-") as temporary:
        place = (folder or Path(temporary)).absolute()
        place.mkdir(parents=True, exist_ok=True)
        try:
            require_tools()
            trials = [_try(name, place) for name in recipes or ["cpu", "gpu", "proxy"]]
        except RecipeError as error:
            console.print(f"[bold red]error:[/] {escape(str(error))}")
            raise typer.Exit(1) from None
    _print(trials)


def _try(name: str, place: Path) -> Trial:
    trial = Trial(name)
    console.print(f"[bold]docker/{name}.Dockerfile[/]")
    start = time.monotonic()
    image = _build(name, place)
    trial.note("built", f"{time.monotonic() - start:.0f} s, {_size(image.root) / 1e9:.1f} GB")
    with Container(image) as container:
        trial.note(
            "health check", f"passes after {container.wait_healthy():.0f} s as user {image.user}, root read-only"
        )
        trial.note("compilers at run time", _find_compilers(container))
        if name != "proxy":
            trial.note("answer of an adapter", _ask(container))
        status, seconds = container.stop()
        trial.note("SIGTERM", f"ends with status {status} after {seconds:.0f} s")
    return trial


def _build(name: str, place: Path) -> Image:
    base = make_base(place / "base")
    recipe = Recipe(
        read_dockerfile(REPOSITORY / "docker" / f"{name}.Dockerfile"),
        context=REPOSITORY,
        base=_with_server(base, place / "base-with-server") if name == "gpu" else base,
        folder=place / name,
    )
    return recipe.build(_show)


def _with_server(base: Path, root: Path) -> Path:
    """A copy of `base` with a tritonserver where NVIDIA's image has one."""
    if not root.exists():
        subprocess.run(["cp", "--archive", base, root], check=True)
        install: list[Path | str] = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", root / "opt" / "wheel"]
        subprocess.run([sys.executable, *install, "-c", REPOSITORY / "constraints.txt", "nvidia-pytriton"], check=True)
        (root / "opt" / "tritonserver").symlink_to("wheel/pytriton/tritonserver")
    return root


def _size(root: Path) -> int:
    """Bytes of the files below `root`, each counted once."""
    entries = [path.lstat() for path in root.rglob("*") if not path.is_dir() or path.is_symlink()]
    return sum({entry.st_ino: entry.st_size for entry in entries}.values())


def _show(instruction: Instruction) -> None:
    console.print(f"  [dim]{instruction.name} {escape(' '.join(instruction.arguments.split())[:100])}[/]")


class Container:
    """An image's entry point, running in namespaces of its own."""

    def __init__(self, image: Image) -> None:
        self._image = image
        volumes = {"/model": ensure_default_checkpoint(), "/adapters": REPOSITORY / "adapters"}
        # In its new process namespace the entry point is process 1, as in a container.
        self._namespace = subprocess.Popen(
            image.run_command(image.entrypoint, volumes, _SHM_SIZE), stdin=subprocess.DEVNULL
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._namespace.kill()
        self._namespace.wait()

    def execute(self, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command as `docker exec` would."""
        return subprocess.run(self._image.exec_command(self._pid, arguments), capture_output=True, text=True)

    def wait_healthy(self) -> float:
        """Wait until the health check passes; the seconds that it took. Raises RecipeError."""
        start = time.monotonic()
        while time.monotonic() - start < _READY_TIMEOUT_S and self._namespace.poll() is None:
            time.sleep(1)
            if self.execute(self._image.healthcheck).returncode == 0:
                return time.monotonic() - start
        raise RecipeError("the health check never passed")

    def stop(self) -> tuple[int, float]:
        """Send SIGTERM; the exit status, and the seconds until then. Raises subprocess.TimeoutExpired."""
        start = time.monotonic()
        os.kill(self._pid, signal.SIGTERM)
        return self._namespace.wait(_EXIT_TIMEOUT_S), time.monotonic() - start

    @property
    def _pid(self) -> int:
        """The entry point's process id on this machine."""
        pid = self._namespace.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if not children:
            raise RecipeError("the entry point is not running")
        return int(children[0])


def _ask(container: Container) -> str:
    result = container.execute(_QUESTION)
    if result.returncode:
        raise RecipeError(f"{' '.join(_QUESTION)}: status {result.returncode}\n{result.stdout}{result.stderr}")
    return result.stdout.strip()


def _find_compilers(container: Container) -> str:
    found = container.execute(["sh", "-c", "command -v cc; command -v g++"]).stdout.split()
    return ", ".join(found) or "none"


def _print(trials: Sequence[Trial]) -> None:
    table = Table("recipe", "tried", "seen", title="Dockerfiles carried out without a container engine")
    for trial in trials:
        for tried, outcome in trial.findings:
            table.add_row(trial.recipe, tried, escape(outcome))
    console.print(table)
