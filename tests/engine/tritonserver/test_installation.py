import os
import subprocess
import sys
from pathlib import Path

import pytest

from multilora_engine.errors import ConfigError
from multilora_engine.tritonserver import ServerOptions, ServerProcess
from multilora_engine.tritonserver.installation import (
    check_programs,
    find_installation,
    make_backend_directory,
    server_environment,
)


def test_the_first_python_on_path_is_this_environments() -> None:
    first = server_environment({})["PATH"].split(os.pathsep)[0]
    assert (Path(first) / "python3").exists()
    assert Path(first) == Path(sys.executable).parent


def test_variables_are_added() -> None:
    assert server_environment({"MULTILORA_MODEL": "m"})["MULTILORA_MODEL"] == "m"


def test_large_tensors_ask_for_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    code = r"""
import re, torch
from pathlib import Path
tensor = torch.zeros(16 << 20)
maps = re.split(r"\n(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text())
for text in maps:
    start, end = (int(address, 16) for address in text.split()[0].split("-"))
    if start <= tensor.data_ptr() < end:
        print("hg" in text.split("VmFlags:")[1].split())
"""
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, env=server_environment({}), capture_output=True, text=True, check=True)
    assert told.stdout == "True\n"


def test_numpy_has_no_threads_that_take_processors_from_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    program = "import numpy, os; m = numpy.ones((500, 500)); m @ m; print(len(os.listdir('/proc/self/task')))"
    command = [sys.executable, "-c", program]
    told = subprocess.run(command, env=server_environment({}), capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["1"]


@pytest.fixture
def no_openmp_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_openmp_choice")
def test_openmp_threads_look_for_each_other_a_while_before_they_sleep() -> None:
    environment = server_environment({})
    assert 0 < int(environment["GOMP_SPINCOUNT"]) < 10_000
    assert "OMP_WAIT_POLICY" not in environment


@pytest.mark.usefixtures("no_openmp_choice")
@pytest.mark.parametrize(("name", "value"), [("OMP_WAIT_POLICY", "ACTIVE"), ("GOMP_SPINCOUNT", "7")])
def test_an_operators_own_choice_of_how_openmp_threads_wait_is_the_only_one(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    environment = server_environment({})
    assert {key: environment[key] for key in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT") if key in environment} == {
        name: value
    }


def test_a_server_without_bash_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"bash is not on PATH.*; install it \(apt-get install bash"):
        ServerProcess(ServerOptions(model_repository=tmp_path, http_port=0, grpc_port=0, metrics_port=0)).start()


def test_a_python_without_its_usual_name_is_refused_with_the_command_that_gives_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "python3.12").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3.12"))
    with pytest.raises(ConfigError, match=r"has no python3.*; make it: ln -s python3.12 .*/python3"):
        check_programs(server_environment({}))


def test_the_stub_of_this_python_lies_beside_the_backends_library(tmp_path: Path) -> None:
    folder = make_backend_directory(find_installation(), tmp_path / "backends")
    files = {file.name: file.resolve() for file in (folder / "python").iterdir()}
    assert set(files) == {"libtriton_python.so", "triton_python_backend_utils.py", "triton_python_backend_stub"}
    assert all(file.is_file() for file in files.values())
    assert files["triton_python_backend_stub"].parent.name == f"{sys.version_info.major}.{sys.version_info.minor}"


def test_a_server_with_a_complete_backend_folder_of_its_own_needs_none_of_ours(tmp_path: Path) -> None:
    executable = tmp_path / "bin" / "tritonserver"
    executable.parent.mkdir()
    executable.touch(mode=0o755)
    installation = find_installation(executable)
    assert installation.executable == executable
    assert installation.python_backend == ()


def test_a_wheel_without_a_stub_for_this_python_is_refused(tmp_path: Path) -> None:
    executable = tmp_path / "bin" / "tritonserver"
    executable.parent.mkdir()
    executable.touch(mode=0o755)
    (tmp_path / "python_backend_stubs" / "3.8").mkdir(parents=True)
    with pytest.raises(ConfigError, match="has no Python backend for Python 3"):
        find_installation(executable)


def test_a_file_that_cannot_be_executed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tritonserver").touch(mode=0o644)
    with pytest.raises(ConfigError, match="not an executable file"):
        find_installation(tmp_path / "tritonserver")
