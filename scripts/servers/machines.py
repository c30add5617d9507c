"""`Machines`: network namespaces on one bridge, so that processes are on machines of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

_NETWORKS = tuple(f"10.78.{number}" for number in range(256))
_PREFIX_BITS = 24
_FIRST_HOST = 10


@dataclass(frozen=True)
class Machine:
    """command: begins the command line of a process on it. cable: the interface that joins it to the others."""

    address: str
    command: tuple[str, ...]
    cable: str

    def cut(self) -> None:
        """Pull its cable: packets to it or from it are lost."""
        _ip("link", "set", self.cable, "down")

    def join(self) -> None:
        """Put the cable back."""
        _ip("link", "set", self.cable, "up")


class Machines:
    """Namespaces that end with the block. The caller's own network has the first address of their bridge.

    Their addresses are of the first network that no interface here has: another run may have one, and a killed one
    leaves its bridge behind. Raises subprocess.CalledProcessError if the user may not make namespaces.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._name = f"ml{os.getpid() % 100_000}"
        self._resources = ExitStack()
        self._network = _free_network()
        self.own_address = f"{self._network}.1"
        self.all: list[Machine] = []

    def __enter__(self) -> Self:
        with ExitStack() as resources:
            bridge = f"{self._name}b"
            _ip("link", "add", bridge, "type", "bridge")
            resources.callback(_ip, "link", "del", bridge)
            _ip("addr", "add", f"{self.own_address}/{_PREFIX_BITS}", "dev", bridge)
            _ip("link", "set", bridge, "up")
            for number in range(self._number):
                self.all.append(self._make(number, bridge, resources))
            self._resources = resources.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._resources.close()

    def _make(self, number: int, bridge: str, resources: ExitStack) -> Machine:
        name, address = f"{self._name}m{number}", f"{self._network}.{_FIRST_HOST + number}"
        cable, inside = f"{name}o", f"{name}i"
        _ip("netns", "add", name)
        resources.callback(_ip, "netns", "del", name)
        _ip("link", "add", cable, "type", "veth", "peer", "name", inside, "netns", name)
        _ip("link", "set", cable, "master", bridge, "up")
        _ip("-n", name, "addr", "add", f"{address}/{_PREFIX_BITS}", "dev", inside)
        _ip("-n", name, "link", "set", inside, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        return Machine(address, ("ip", "netns", "exec", name), cable)


def can_make_machines() -> bool:
    """Whether this user may make namespaces, and has the program for it."""
    if shutil.which("ip") is None:
        return False
    try:
        with Machines(1):
            return True
    except subprocess.CalledProcessError:
        return False


def _free_network() -> str:
    taken = _ip("-oneline", "address", "show", "to", f"{_NETWORKS[0]}.0/16")
    free = [network for network in _NETWORKS if f" {network}." not in taken]
    if not free:
        raise RuntimeError(f"all networks of {_NETWORKS[0]}.0/16 are taken: delete the bridges that other runs left")
    return free[0]


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
