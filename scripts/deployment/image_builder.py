"""Builds images from Dockerfiles with Debian's buildah, on a base that debootstrap makes in place of Debian's image."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from deployment.clean_root import Image, ImageError
from repository import REPOSITORY

BASE = "localhost/debian"
_SHOWN_LINES = 25
_CERTIFICATES = "/run/host-certificates.crt"
_STEP = re.compile(r"(\[\d+/\d+\] )?STEP ")


class ImageBuilder:
    """A store of images in `folder`, which is made if it does not exist."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._policy = folder / "policy.json"  # buildah wants to be told whose images it may take
        self._policy.write_text('{"default": [{"type": "insecureAcceptAnything"}]}')

    def make_base(self, suite: str = "bookworm") -> Path:
        """Make a minimal Debian the image `BASE`, if it does not exist yet; returns its root."""
        root = self._folder / "base"
        if not root.exists():
            draft = root.with_suffix(".draft")
            shutil.rmtree(draft, ignore_errors=True)
            self._run("debootstrap", "--variant=minbase", suite, draft)
            draft.rename(root)
        if not self._run("images", "--quiet", "--filter", f"reference={BASE}"):
            self.import_root(root, BASE)
        return root

    def import_root(self, root: Path, name: str) -> None:
        """Make a root file system an image of one layer."""
        container = self._run("from", "scratch")
        self._run("copy", "--quiet", container, root, "/")
        self._run("commit", "--quiet", "--rm", "--signature-policy", self._policy, container, name)

    def build(self, dockerfile: Path, name: str, arguments: Mapping[str, str], on_step: Callable[[str], None]) -> None:
        """Build a Dockerfile with the repository as its context. on_step: told each instruction. Raises ImageError."""
        command: list[str | Path] = [
            "bud",
            "--format=docker",
            "--signature-policy",
            self._policy,
            "--file",
            dockerfile,
            "--tag",
            name,
        ]
        command += [f"--build-arg={key}={value}" for key, value in arguments.items()]
        command += [f"--volume={source}:{place}:ro" for place, source in self.mounts().items()]
        with self._start(*command, REPOSITORY) as builder:
            assert builder.stdout is not None
            lines: list[str] = []
            for line in builder.stdout:
                lines.append(line)
                if _STEP.match(line):
                    on_step(line.strip())
        if builder.returncode:
            raise ImageError(f"{dockerfile.name}: status {builder.returncode}:\n{''.join(lines[-_SHOWN_LINES:])}")

    def open(self, name: str) -> Image:
        """A container of an image, with the image's settings. Its root can be written, as the image's cannot."""
        image = msgspec.json.decode(self._run("inspect", "--type=image", name))
        config: dict[str, Any] = image["Docker"]["config"]
        container = self._run("from", "--pull-never", "--signature-policy", self._policy, name)
        return Image(
            root=Path(self._run("mount", container)),
            environment=dict(setting.split("=", 1) for setting in config.get("Env") or ()),
            folder=config.get("WorkingDir") or "/",
            user=config.get("User") or "0:0",
            volumes=list(config.get("Volumes") or ()),
            entrypoint=config.get("Entrypoint") or [],
            healthcheck=(config.get("Healthcheck") or {"Test": []})["Test"][1:],
            num_layers=len(image["Docker"]["rootfs"]["diff_ids"]),
        )

    def _run(self, *arguments: str | Path) -> str:
        """Run buildah and return its output. Raises ImageError."""
        with self._start(*arguments, stderr=subprocess.PIPE) as process:
            output, errors = process.communicate()
        if process.returncode:
            tail = "\n".join((output + errors).splitlines()[-_SHOWN_LINES:])
            raise ImageError(f"buildah {shlex.join(map(str, arguments))}: status {process.returncode}:\n{tail}")
        return output.strip()

    def _start(self, *arguments: str | Path, stderr: int = subprocess.STDOUT) -> subprocess.Popen[str]:
        program = REPOSITORY / "scripts" / "deployment" / "buildah"
        return subprocess.Popen(
            [program, *arguments],
            env=os.environ | {"IMAGES": str(self._folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )

    def mounts(self) -> dict[str, Path]:
        """The files of this machine that commands in a root need to reach package indexes, by their places inside."""
        settings = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
        ).stdout
        values = dict(re.findall(r"^(?:global|:env:)\.([\w-]+)='(.*)'$", settings, re.MULTILINE))
        named = {Path(place) for value in values.values() for place in re.findall(r"(?:file://)?(/[\w./-]+)", value)}
        places = {place.parent if place.name == "simple" else place for place in named if place.exists()}
        mounts = {str(place): place for place in places}
        if "cert" in values:  # at another place: a package that writes its own file there may be installed
            mounts[_CERTIFICATES] = mounts.pop(values["cert"])
            values["cert"] = _CERTIFICATES
        pip = self._folder / "pip.conf"
        pip.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in values.items()))
        return {"/etc/pip.conf": pip, "/etc/resolv.conf": Path("/etc/resolv.conf"), **mounts}
