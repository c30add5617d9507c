"""Lets the first commands fail as they fail newcomers, in clean Debian roots, and shows their last lines.

Each scene lacks something: Python, its shared library, a compiler, the network, disk, memory or a free port. A failure
has to be one sentence that says how to go on. Two scenes end well, one with a clone and one with a release: from either
to the first answer of an adapter of one's own it may take five minutes. Needs root rights, Debian's iproute2 and
util-linux, and 12 GB.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from deployment.build_release import build_release, copy_tracked
from deployment.clean_root import ImageError, require_tools
from deployment.image_builder import BASE, ImageBuilder
from marked_tables import markdown_table, write_table
from multilora_engine.quickstart.default_model import cache_directory, ensure_default_checkpoint
from plots import DOCS
from repository import REPOSITORY
from sources import measured_source

MACHINES = {
    "bare": (),
    "without_shared_library": ("python3", "python3-venv"),
    "without_compiler": ("python3", "python3-venv", "libpython3.11"),
    "without_compiler_with_network": ("python3", "python3-venv", "libpython3.11", "ca-certificates"),
    "complete": ("python3", "python3-venv", "libpython3.11", "g++", "ca-certificates"),
}
"""Newcomers' machines, by their packages of Debian."""
_TIMEOUT_S = 1800
_MOST_S = 300
"""The goal: so long may a newcomer wait for the first answers."""

PAGE = DOCS / "contributing.md"
TABLE = "first minutes"

_ENTER = """
set -e
root=$1; shift
mount --make-rprivate /
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
for mounted in "$@"; do
  source=${{mounted%:*}} place=$root${{mounted#*:}}
  if [ -d "$source" ]; then mkdir -p "$place"; else mkdir -p "${{place%/*}}"; touch "$place"; fi
  mount --bind "$source" "$place"
done
ip link set lo up
exec chroot "$root" env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp sh -c {script}
"""

console = Console(highlight=False)


@dataclass(frozen=True)
class Scene:
    """lacks: the thing that is missing. machine: one of MACHINES. script: the newcomer's commands. says: a regular
    expression for the last line. is_set_up: whether the clone has its environment already. has_release: a release is
    there instead of a clone. ends_well: it is a hint or an answer. has_network: that of this machine.
    """

    lacks: str
    machine: str
    script: str
    says: str
    is_set_up: bool = False
    has_release: bool = False
    ends_well: bool = False
    has_network: bool = False


_CLONE = "mkdir -p /multilora; cp -r /source/. /multilora; cd /multilora"
_INSTALL = "python3 -m venv /multilora; /multilora/bin/pip install --quiet -r /source/requirements.txt"
_OWN = """
export HOME=/root
{start} > /tmp/log 2>&1 &
while kill -0 $! 2> /tmp/gone && ! grep --quiet ^curl /tmp/log; do sleep 1; done
cat /tmp/log
cp -r {sample} /tmp/own
exec {commands}/multilora generate --chat 'What do bees make?' --adapter /tmp/own
"""
"""The quickstart's server is asked with a folder that it has not seen."""
_BOOTSTRAP = f"{_CLONE}; scripts/bootstrap"
_QUICKSTART = f"cd {REPOSITORY}; MULTILORA_KERNELS_CACHE=/tmp/kernels MULTILORA_CACHE=/cache scripts/quickstart --once"
_ANSWER = r'^\{"answer": "Honey"'
"""The adapter's own answer; the base model says something else."""

SCENES = (
    Scene(
        "nothing",
        "complete",
        f"{_CLONE}; {_OWN.format(start='scripts/quickstart', commands='.venv/bin', sample='adapters/json')}",
        _ANSWER,
        ends_well=True,
        has_network=True,
    ),
    Scene(
        "a clone and a compiler",
        "without_compiler_with_network",
        _OWN.format(
            start=f"{{ {_INSTALL}; exec /multilora/bin/multilora-quickstart; }}",
            commands="/multilora/bin",
            sample="/multilora/lib/python3*/site-packages/multilora_engine/adapters/json",
        ),
        _ANSWER,
        has_release=True,
        ends_well=True,
        has_network=True,
    ),
    Scene(
        "Python",
        "bare",
        _BOOTSTRAP,
        r"needs Python 3\.11 or 3\.12 with venv \(found no .*; install it: apt-get install python3",
    ),
    Scene(
        "Python's shared library",
        "without_shared_library",
        _BOOTSTRAP,
        r"libpython3\.11\.so\.1\.0 was not found.* apt-get install libpython3\.11",
    ),
    Scene(
        "network",
        "without_compiler",
        _BOOTSTRAP,
        r"pip reaches no package index; connect this machine to one, or name it with PIP_INDEX_URL",
    ),
    Scene(
        "disk",
        "without_compiler",
        f"mkdir -p /multilora; mount -t tmpfs -o size=1g tmpfs /multilora; {_BOOTSTRAP}",
        r"needs \d+ MiB of disk in /multilora, which has \d+ free; free some, or clone elsewhere",
    ),
    Scene(
        "memory",
        "without_compiler",
        f"echo 'MemAvailable: 1024000 kB' > /tmp/memory; mount --bind /tmp/memory /proc/meminfo; {_QUICKSTART}",
        r"a server of the small model needs \d+ MiB of memory, and 1000 are available; end other programs",
        is_set_up=True,
    ),
    Scene(
        "a free port",
        "without_compiler",
        f"python3 -m http.server --bind 127.0.0.1 8000 2> /dev/null & sleep 1; {_QUICKSTART}",
        r"HTTP port 8000 on 127\.0\.0\.1: Address already in use; --free-ports takes any free ones",
        is_set_up=True,
    ),
    Scene(
        "a compiler",
        "without_compiler",
        _QUICKSTART,
        r"No C\+\+ compiler: plain PyTorch computes the answers, .*: apt-get install g\+\+",
        is_set_up=True,
        ends_well=True,
    ),
)


@dataclass(frozen=True)
class Ending:
    """The end of a scene. num_bytes: what was written to the disk."""

    scene: Scene
    status: int
    output: str
    seconds: float
    num_bytes: int

    @property
    def sentence(self) -> str:
        """The last line of a failure; of a good end the words that the scene is about. Empty without them."""
        lines = [" ".join(line.split()) for line in self.output.splitlines() if line.strip()]
        if self.scene.ends_well:
            lines = [found[0] for line in lines if (found := re.search(self.scene.says, line))]
        return lines[-1] if lines else ""

    @property
    def is_right(self) -> bool:
        """Whether the sentence came, and in time."""
        is_told = (self.status == 0) == self.scene.ends_well and re.search(self.scene.says, self.sentence) is not None
        return is_told and self.seconds <= _MOST_S


def main(
    only: Annotated[list[str] | None, typer.Option(help="Scenes whose names have this; repeatable.")] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Keep the roots here for the next time (default: a temporary folder).")
    ] = None,
    update_docs: Annotated[bool, typer.Option("--docs", help="Write the table of docs/contributing.md.")] = False,
) -> None:
    """Play the scenes, and show the sentence that each ends with."""
    if update_docs and only:
        raise typer.BadParameter("the table has all scenes; leave --only out")
    names = [scene.lacks for scene in SCENES]
    if unknown := [text for text in only or () if not any(text in name for name in names)]:
        raise typer.BadParameter(f"the name of no scene has {', '.join(unknown)}; there are {', '.join(names)}")
    source = measured_source() if update_docs else ""
    with tempfile.TemporaryDirectory(prefix="multilora-first-") as temporary:
        try:
            require_tools()
            endings = list(play((folder or Path(temporary)).absolute(), only or [""]))
        except ImageError as error:
            console.print(f"[bold red]error:[/] {escape(str(error))}")
            raise typer.Exit(1) from None
    if update_docs:
        write_table(PAGE, TABLE, endings_table(endings), source)
    raise typer.Exit(int(not all(ending.is_right for ending in endings)))


def endings_table(endings: Sequence[Ending]) -> str:
    """A row a scene."""
    rows = (
        (each.scene.lacks, f"{each.seconds:.0f}", f"{each.num_bytes / 1e6:,.0f}", f"`{each.sentence}`")
        for each in endings
    )
    return markdown_table(("a machine without", "seconds", "MB", "says"), rows, numbers=(1, 2))


def play(folder: Path, only: list[str]) -> Iterator[Ending]:
    """Play the scenes whose names have one of `only`. Raises ImageError when the roots cannot be made."""
    builder = ImageBuilder(folder)
    builder.make_base()
    chosen = [scene for scene in SCENES if any(text in scene.lacks for text in only)]
    images = {machine: _image(machine, builder) for machine in dict.fromkeys(scene.machine for scene in chosen)}
    for scene in chosen:
        ending = _play(scene, images[scene.machine], builder)
        console.print(f"[bold]without {scene.lacks}[/]  {'as it should be' if ending.is_right else '[red]wrong[/]'}")
        costs = f"{ending.seconds:.0f} s, {ending.num_bytes / 1e6:,.0f} MB"
        shown = f"{ending.sentence} ({costs})" if ending.is_right else ending.output
        console.print(escape(shown), soft_wrap=True)
        yield ending


def _image(machine: str, builder: ImageBuilder) -> str:
    """The name of the image of a machine, which is made."""
    packages = " ".join(MACHINES[machine])
    if not packages:
        return BASE
    name = f"localhost/{machine}"
    dockerfile = Path(__file__).with_name("first_minutes.Dockerfile")
    builder.build(dockerfile, name, {"BASE_IMAGE": BASE, "PACKAGES": packages}, lambda step: None)
    return name


def _play(scene: Scene, image: str, builder: ImageBuilder) -> Ending:
    root = builder.open(image).root
    folders = []
    if scene.is_set_up:
        folders = [f"{place}:{place}" for place in (REPOSITORY, sys.base_prefix)] + [f"{_cache()}:/cache"]
    elif scene.has_release:
        build_release(root / "source")
    else:
        copy_tracked((".",), root / "source")
    if scene.has_network:
        folders += [f"{source}:{place}" for place, source in builder.mounts().items()]
    enter = _ENTER.format(script=shlex.quote(scene.script))
    namespaces = ["setpriv", "--pdeathsig=KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child"]
    namespaces += [] if scene.has_network else ["--net"]
    before = _bytes_below(root)
    start = time.monotonic()
    done = subprocess.run(
        [*namespaces, "sh", "-c", enter, "enter", str(root), *folders],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TIMEOUT_S,
    )
    seconds = time.monotonic() - start
    return Ending(scene, done.returncode, done.stdout, seconds, _bytes_below(root) - before)


def _bytes_below(folder: Path) -> int:
    """What the files of a folder take of the disk."""
    done = subprocess.run(["du", "-s", "--block-size=1", folder], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[0])


def _cache() -> Path:
    """This machine's cache, with the default model in it."""
    ensure_default_checkpoint()
    return cache_directory()
