"""Clean Debian roots, and the instructions of a Dockerfile carried out in them: no container engine needed.

A root is made by debootstrap; a command runs in it through chroot, in mount and process namespaces of its own. Needs
root rights, and Debian's `debootstrap`, `iproute2` and `util-linux`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import msgspec
from dockerfile_parse import DockerfileParser

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_PASSED_ON = re.compile(r"(?i)(pip_\w+|\w+_proxy)")
_HOST_CERTIFICATES = "/run/host-certificates.crt"

# Programs, and Debian's packages that have them.
_TOOLS = {"debootstrap": "debootstrap", "ip": "iproute2", "unshare": "util-linux", "setpriv": "util-linux"}

# Nothing that runs in a root outlives this process.
_NAMESPACES = ["setpriv", "--pdeathsig=KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child"]

_ENTER = """
set -e
root=$1; shift
mount --make-rprivate /
mount --bind "$root" "$root"
touch "$root{certificates}"
[ -z "$SSL_CERT_FILE" ] || mount --bind "$SSL_CERT_FILE" "$root{certificates}"
for file in /etc/resolv.conf /etc/pip.conf; do
  [ ! -e $file ] || {{ touch "$root$file"; mount --bind $file "$root$file"; }}
done
for folder in {folders}; do mkdir -p "$root$folder"; mount --bind $folder "$root$folder"; done
mount -t proc proc "$root/proc"
exec "$@"
"""

_START = """
set -e
root=$1; shift
mount --make-rprivate /
mount --bind "$root" "$root"
{volumes}
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mkdir -p "$root/dev/shm"
mount -t tmpfs -o size={shm_size},mode=1777 tmpfs "$root/dev/shm"
mount -t proc proc "$root/proc"
mount -o remount,bind,ro "$root"
ip link set lo up
exec "$@"
"""


class RecipeError(RuntimeError):
    """An instruction failed, or is not understood."""


@dataclass(frozen=True)
class Instruction:
    """One instruction of a Dockerfile, such as RUN, with its arguments as written."""

    name: str
    arguments: str


@dataclass
class Image:
    """A root file system and the instructions' settings for running it."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "0:0"
    volumes: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)

    def build_command(self, script: str, variables: Mapping[str, str]) -> list[str]:
        """The command line that runs a shell script in this image as RUN does, with this machine's network."""
        enter = _ENTER.format(certificates=_HOST_CERTIFICATES, folders=shlex.join(_package_folders()))
        return [
            *_NAMESPACES,
            "sh",
            "-c",
            enter,
            "enter",
            str(self.root),
            *self._inside(["sh", "-ec", script], variables),
        ]

    def run_command(self, arguments: Sequence[str], volumes: Mapping[str, Path], shm_size: str) -> list[str]:
        """The command line that starts `arguments` as a container would: read-only root, own network, own /tmp.

        volumes: folders of this machine by their path inside, read-only. The image's other volumes are empty.
        """
        mounts = [f'mkdir -p "$root{at}"; mount --bind -o ro {source} "$root{at}"' for at, source in volumes.items()]
        empty = [volume for volume in self.volumes if volume not in volumes]
        mounts += [f'mkdir -p "$root{at}"; mount -t tmpfs -o mode=1777 tmpfs "$root{at}"' for at in empty]
        start = _START.format(volumes="\n".join(mounts), shm_size=shm_size)
        return [*_NAMESPACES, "--net", "sh", "-c", start, "start", str(self.root), *self._inside(arguments, {})]

    def exec_command(self, pid: int, arguments: Sequence[str]) -> list[str]:
        """The command line that runs `arguments` beside the process `pid` of `run_command`, as `docker exec` does."""
        user, group = self.user.split(":")
        enter = ["nsenter", f"--target={pid}", "--mount", "--pid", "--net", "--root", "--wdns=" + self.folder]
        return [*enter, f"--setuid={user}", f"--setgid={group}", *self._with_environment(arguments, {})]

    def _inside(self, arguments: Sequence[str], variables: Mapping[str, str]) -> list[str]:
        command = shlex.join(self._with_environment(arguments, variables))
        return ["chroot", f"--userspec={self.user}", str(self.root), "sh", "-c", f"cd {self.folder} && exec {command}"]

    def _with_environment(self, arguments: Sequence[str], variables: Mapping[str, str]) -> list[str]:
        settings = [f"{name}={value}" for name, value in (self.environment | dict(variables)).items()]
        return ["env", "-i", *settings, *arguments]


def read_dockerfile(path: Path) -> list[Instruction]:
    """The instructions of a Dockerfile, without comments."""
    parser = DockerfileParser(fileobj=path.open("rb"))
    return [
        Instruction(entry["instruction"], entry["value"])
        for entry in parser.structure
        if entry["instruction"] != "COMMENT"
    ]


def require_tools() -> None:
    """Raises RecipeError, with the packages to install, when a program for making or entering roots is missing."""
    missing = sorted({package for program, package in _TOOLS.items() if shutil.which(program) is None})
    if missing:
        raise RecipeError(f"programs are missing here: apt-get install {' '.join(missing)}")


def make_base(folder: Path, suite: str = "bookworm") -> Path:
    """A minimal Debian in `folder`, made when it is not there yet."""
    if not folder.exists():
        draft = folder.with_suffix(".draft")
        shutil.rmtree(draft, ignore_errors=True)
        _execute(["debootstrap", "--variant=minbase", suite, str(draft)])
        draft.rename(folder)
    return folder


class Recipe:
    """Carries out a Dockerfile's stages, each in a copy of `base` in place of the image that its FROM names."""

    def __init__(self, instructions: Sequence[Instruction], context: Path, base: Path, folder: Path) -> None:
        self._instructions = instructions
        self._context = context
        self._base = base
        self._folder = folder
        self._arguments: dict[str, str] = {}
        self._stages: dict[str, Image] = {}
        self._image: Image | None = None

    def build(self, on_instruction: Callable[[Instruction], None]) -> Image:
        """Carry out all instructions in order; the last stage. Raises RecipeError."""
        for instruction in self._instructions:
            on_instruction(instruction)
            self._carry_out(instruction)
        return self._stage()

    def _carry_out(self, instruction: Instruction) -> None:
        arguments = instruction.arguments
        match instruction.name:
            case "FROM":
                self._from(arguments)
            case "ARG":
                self._arg(arguments)
            case "ENV":
                self._env(arguments)
            case "RUN":
                _execute(self._stage().build_command(arguments, self._arguments | _passed_on()))
            case "COPY":
                self._copy(arguments)
            case "WORKDIR":
                self._workdir(self._substitute(arguments))
            case "USER":
                self._stage().user = {"root": "0:0"}.get(arguments, arguments)
            case "VOLUME":
                self._stage().volumes += arguments.split()
            case "ENTRYPOINT":
                self._stage().entrypoint = msgspec.json.decode(arguments, type=list[str])
            case "HEALTHCHECK":
                self._stage().healthcheck = msgspec.json.decode(arguments.split(" CMD ")[1], type=list[str])
            case "EXPOSE" | "STOPSIGNAL":
                pass  # nothing to open without a container, and its user chooses the signal that ends it
            case name:
                raise RecipeError(f"{name} is not understood")

    def _stage(self) -> Image:
        if self._image is None:
            raise RecipeError("there is no FROM")
        return self._image

    def _from(self, arguments: str) -> None:
        name = arguments.split(" AS ")[1] if " AS " in arguments else str(len(self._stages))
        root = self._folder / f"stage-{len(self._stages)}"
        shutil.rmtree(root, ignore_errors=True)
        root.parent.mkdir(exist_ok=True)
        _execute(["cp", "--archive", "--reflink=auto", str(self._base), str(root)])
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        self._image = self._stages[name] = Image(root, environment={"PATH": path})
        self._arguments = {}

    def _arg(self, arguments: str) -> None:
        name, _, default = arguments.partition("=")
        self._arguments.setdefault(name, default.strip('"'))

    def _env(self, arguments: str) -> None:
        image = self._stage()
        for setting in shlex.split(arguments):
            name, _, value = setting.partition("=")
            image.environment[name] = self._substitute(value)

    def _workdir(self, folder: str) -> None:
        self._stage().folder = folder
        self._make_folder(folder)

    def _make_folder(self, folder: str) -> None:
        (self._stage().root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def _copy(self, arguments: str) -> None:
        image, words = self._stage(), self._substitute(arguments).split()
        source_root, is_ignored = self._context, _ignore_rules(self._context)
        if words[0].startswith("--from="):
            source_root, is_ignored = self._stages[words.pop(0).removeprefix("--from=")].root, lambda name: False
        *sources, target = words
        for source in sources:
            place = image.root / os.path.join(image.folder, target).lstrip("/")
            _copy_tree(source_root / source.lstrip("/"), place, is_ignored)

    def _substitute(self, text: str) -> str:
        values = self._arguments | self._stage().environment
        return _VARIABLE.sub(lambda match: values.get(match[1] or match[2], ""), text)


def _passed_on() -> dict[str, str]:
    """The variables for reaching package indexes from here. Certificates get the path at which the root has them."""
    variables = {name: value for name, value in os.environ.items() if _PASSED_ON.fullmatch(name)}
    if "SSL_CERT_FILE" in os.environ:
        variables |= {"PIP_CERT": _HOST_CERTIFICATES, "SSL_CERT_FILE": _HOST_CERTIFICATES}
    return variables


def _package_folders() -> list[str]:
    """The folders of this machine that pip takes packages from, beside the network."""
    settings = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    places = re.findall(r"(?:file://)?(/[\w./-]+)", settings)
    folders = {Path(place).parent if place.endswith("/simple") else Path(place) for place in places}
    return sorted(str(folder) for folder in folders if folder.is_dir())


def _ignore_rules(context: Path) -> Callable[[str], bool]:
    """Names that .dockerignore leaves out at any depth (its `**/` lines)."""
    lines = (context / ".dockerignore").read_text().splitlines()
    patterns = [line.removeprefix("**/") for line in lines if line.startswith("**/")]
    return lambda name: any(fnmatch(name, pattern) for pattern in patterns)


def _copy_tree(source: Path, place: Path, is_ignored: Callable[[str], bool]) -> None:
    if source.is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, place / source.name if place.is_dir() else place)
        return
    shutil.copytree(
        source,
        place,
        symlinks=True,
        dirs_exist_ok=True,
        ignore=lambda _, names: [name for name in names if is_ignored(name)],
    )


def _execute(command: Sequence[str]) -> None:
    result = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if result.returncode:
        tail = "\n".join(result.stdout.splitlines()[-25:])
        raise RecipeError(f"status {result.returncode} from {shlex.join(command[-1:])[:200]}:\n{tail}")
