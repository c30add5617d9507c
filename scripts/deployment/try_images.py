"""Builds the Dockerfiles with Debian's buildah, looks at the images, and serves from them.

In place of Debian's image there is one that debootstrap makes. The entry point runs as the image's user in namespaces
of its own, with a read-only root, until the health check passes. A client asks with a sample adapter, and SIGTERM ends
it.

The GPU recipe gets the PyPI server at the place where NVIDIA's image has its own, and serves on the CPU: its steps are
tried, its GPU is not. The proxy runs without a server behind it. `--docs` writes a row of docker/README.md's table for
each recipe that was tried, with its command, machine and commit, and leaves the other rows as they are. Needs root
rights, Debian's iproute2 and util-linux, some minutes and 15 GB.
"""

from __future__ import annotations

import os
import re
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

from deployment.clean_root import Image, ImageError, require_tools
from deployment.image_builder import BASE, ImageBuilder
from marked_tables import console_table, markdown_table, read_cells, read_table, write_table
from multilora_engine.quickstart.default_model import ensure_default_checkpoint
from multilora_engine.tritonserver.launch import sigterm_as_ctrl_c
from repository import REPOSITORY
from sources import measured_source

_READY_TIMEOUT_S = 300.0
_EXIT_TIMEOUT_S = 60.0
_SHM_SIZE = "1g"
_SERVER_BASE = "localhost/tritonserver"
RECIPES = ("cpu", "gpu", "proxy")
PAGE, TABLE = REPOSITORY / "docker" / "README.md", "images"
_TRIED = ("size", "user", "health check", "compilers at run time", "answer of an adapter", "SIGTERM")
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
        typer.Option(help="Keep the images here, and the base for the next time (default: a temporary folder)."),
    ] = None,
    update_docs: Annotated[
        bool, typer.Option("--docs", help="Write the rows of these recipes in the table of docker/README.md.")
    ] = False,
) -> None:
    """Build the Dockerfiles, start their entry points, and send each server a request."""
    if unknown := set(recipes or ()) - set(RECIPES):
        raise typer.BadParameter(f"no recipe is called {', '.join(sorted(unknown))}; there are {', '.join(RECIPES)}")
    source = measured_source() if update_docs else ""
    with sigterm_as_ctrl_c(), tempfile.TemporaryDirectory(prefix="multilora-images-") as temporary:
        try:
            require_tools()
            builder = ImageBuilder((folder or Path(temporary)).absolute())
            trials = [try_image(name, builder) for name in recipes or RECIPES]
        except ImageError as error:
            console.print(f"[bold red]error:[/] {escape(str(error))}")
            raise typer.Exit(1) from None
    findings = [(trial.recipe, *finding) for trial in trials for finding in trial.findings]
    console.print(console_table(("recipe", "tried", "seen"), findings, "Images built by buildah"))
    if update_docs:
        update_page(PAGE, trials, source)


def try_image(name: str, builder: ImageBuilder) -> Trial:
    """Build the Dockerfile of this name and try its image. Raises ImageError."""
    trial = Trial(name)
    console.print(f"[bold]docker/{name}.Dockerfile[/]")
    start = time.monotonic()
    image = _build(name, builder)
    trial.note("built", f"{time.monotonic() - start:.0f} s")
    trial.note("size", f"{_size(image.root) / 1e9:.1f} GB in {image.num_layers} layers")
    trial.note("user", image.user)
    with Container(image) as container:
        trial.note("health check", f"passes after {container.wait_healthy():.0f} s, root read-only")
        trial.note("compilers at run time", _find_compilers(container))
        if name != "proxy":
            trial.note("answer of an adapter", f"`{_ask(container)}`")
        status, seconds = container.stop()
        trial.note("SIGTERM", f"ends with status {status} after {seconds:.0f} s")
    return trial


def _build(name: str, builder: ImageBuilder) -> Image:
    root, arguments = builder.make_base(), {"BASE_IMAGE": BASE}
    if name == "gpu":
        arguments = {"TRITON_IMAGE": _SERVER_BASE}
        builder.import_root(_with_server(root, root.with_name("base-with-server")), _SERVER_BASE)
    builder.build(REPOSITORY / "docker" / f"{name}.Dockerfile", f"localhost/multilora:{name}", arguments, _show)
    return builder.open(f"localhost/multilora:{name}")


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


def _show(step: str) -> None:
    console.print(f"  [dim]{escape(step[:110])}[/]")


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
        """Wait until the health check passes; the seconds that it took. Raises ImageError."""
        start = time.monotonic()
        while time.monotonic() - start < _READY_TIMEOUT_S and self._namespace.poll() is None:
            time.sleep(1)
            if self.execute(self._image.healthcheck).returncode == 0:
                return time.monotonic() - start
        raise ImageError("the health check never passed")

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
            raise ImageError("the entry point is not running")
        return int(children[0])


def _ask(container: Container) -> str:
    result = container.execute(_QUESTION)
    if result.returncode:
        raise ImageError(f"{' '.join(_QUESTION)}: status {result.returncode}\n{result.stdout}{result.stderr}")
    return result.stdout.strip()


def _find_compilers(container: Container) -> str:
    found = container.execute(["sh", "-c", "command -v cc; command -v g++"]).stdout.split()
    return ", ".join(Path(program).name for program in found) or "none"


def update_page(page: Path, trials: Sequence[Trial], source: str) -> None:
    """Write these trials' rows into the page's table, and below it the sentence where each row is from.

    Rows and sentences of other recipes stay: a recipe takes minutes, and can be tried by itself.
    """
    rows = {cells.pop("recipe"): cells for cells in read_cells(page, TABLE)}
    sources = dict(re.findall(r"^- ([a-z]+): (.+)$", read_table(page, TABLE), re.MULTILINE))
    for trial in trials:
        rows[trial.recipe], sources[trial.recipe] = dict(trial.findings), source
    recipes = [recipe for recipe in RECIPES if recipe in rows]
    lines = markdown_table(
        ("recipe", *_TRIED),
        ((recipe, *(rows[recipe].get(tried, "") for tried in _TRIED)) for recipe in recipes),
        numbers=(),
    )
    told = (f"- {recipe}: {sources[recipe]}" for recipe in recipes if recipe in sources)
    write_table(page, TABLE, lines, "\n".join(told))
