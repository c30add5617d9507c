"""Real processes: a parent that is killed, and a child that it had started."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest
from support.fronts import TIMEOUT_S

from multilora_wire.end_with_parent import end_with_parent

STARTS_A_PROGRAM = """
import subprocess
from multilora_wire.end_with_parent import end_with_parent
print(subprocess.Popen(end_with_parent(["sleep", "1000"])).pid, flush=True)
input()
"""
STARTS_A_PROGRAM_OF_OURS = """
import subprocess, sys
ours = "from multilora_wire.end_with_parent import watch_parent; import os, signal; watch_parent(); "
ours += "print(os.getpid(), flush=True); signal.alarm(1000); signal.pause()"
subprocess.Popen([sys.executable, "-c", ours])
input()
"""


@pytest.mark.parametrize("program", [STARTS_A_PROGRAM, STARTS_A_PROGRAM_OF_OURS])
def test_a_child_ends_with_its_killed_parent(program: str) -> None:
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    assert select.select([child], [], [], TIMEOUT_S)[0]
    os.close(child)


def test_a_program_becomes_the_command_under_the_same_id_with_its_arguments_and_status() -> None:
    script = "echo $$ $1; exit 7"
    with subprocess.Popen(end_with_parent(["sh", "-c", script, "sh", "a b"]), stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.read() == f"{child.pid} a b\n".encode()
    assert child.returncode == 7


def test_a_parent_that_ended_before_it_could_be_told_of_is_noticed() -> None:
    command = end_with_parent(["sleep", "1000"])
    command[command.index(str(os.getpid()))] = "1"  # any other process than the one that starts it
    assert subprocess.run(command).returncode == -signal.SIGKILL
