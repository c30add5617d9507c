"""Root file systems of images, entered and started without a container engine.

A command runs in a root through chroot, in mount and process namespaces of its own. Needs root rights, and Debian's
`iproute2` and `util-linux`.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Programs, and Debian's packages that have them.
_TOOLS = {"ip": "iproute2", "unshare": "util-linux", "setpriv": "util-linux"}

# Nothing that runs in a root outlives this process.
_NAMESPACES = ["setpriv", "--pdeathsig=KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child"]

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


class ImageError(RuntimeError):
    """An image cannot be built, or a program started from it fails."""


@dataclass
class Image:
    """A root file system and the image's settings for running it. num_layers: of its base, and of its own."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "0:0"
    volumes: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)
    num_layers: int = 0

    def run_command(self, arguments: Sequence[str], volumes: Mapping[str, Path], shm_size: str) -> list[str]:
        """The command line that starts `arguments` as a container would: read-only root, own network, own /tmp.

        volumes: folders of this machine by their path inside, read-only. The image's other volumes are empty.
        """
        mounts = [f'mkdir -p "$root{at}"; mount --bind -o ro {source} "$root{at}"' for at, source in volumes.items()]
        empty = [volume for volume in self.volumes if volume not in volumes]
        mounts += [f'mkdir -p "$root{at}"; mount -t tmpfs -o mode=1777 tmpfs "$root{at}"' for at in empty]
        start = _START.format(volumes="\n".join(mounts), shm_size=shm_size)
        return [*_NAMESPACES, "--net", "sh", "-c", start, "start", str(self.root), *self._inside(arguments)]

    def exec_command(self, pid: int, arguments: Sequence[str]) -> list[str]:
        """The command line that runs `arguments` beside the process `pid` of `run_command`, as `docker exec` does."""
        user, group = self.user.split(":")
        enter = ["nsenter", f"--target={pid}", "--mount", "--pid", "--net", "--root", "--wdns=" + self.folder]
        return [*enter, f"--setuid={user}", f"--setgid={group}", *self._with_environment(arguments)]

    def _inside(self, arguments: Sequence[str]) -> list[str]:
        command = shlex.join(self._with_environment(arguments))
        return ["chroot", f"--userspec={self.user}", str(self.root), "sh", "-c", f"cd {self.folder} && exec {command}"]

    def _with_environment(self, arguments: Sequence[str]) -> list[str]:
        settings = [f"{name}={value}" for name, value in self.environment.items()]
        return ["env", "-i", *settings, *arguments]


def require_tools() -> None:
    """Raises ImageError, with the packages to install, when a program for entering roots is missing."""
    missing = sorted({package for program, package in _TOOLS.items() if shutil.which(program) is None})
    if missing:
        raise ImageError(f"programs are missing here: apt-get install {' '.join(missing)}")
