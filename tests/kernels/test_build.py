"""Building the CPU operators: once, safely, and with a named error when it fails."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from multilora_kernels.cpu import build

_PACKAGES = Path(build.__file__).parents[2]
_APPLY = """
import logging, sys, torch
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(levelname)s %(message)s")
from multilora_kernels import LoRATables, load_cpu_kernels, lora_segments, lora_shrink
tables = LoRATables(torch.ones(12), torch.tensor([[2]], dtype=torch.int32), *torch.zeros(3, 1, 1, dtype=torch.int64), 2)
segments = lora_segments(torch.tensor([0]), 1)
for _ in range(2):
    print(lora_shrink(torch.ones(1, 6), tables, 0, 1, segments).sum(0).tolist())
print(load_cpu_kernels())
"""


def _run(**environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _APPLY],
        cwd=_PACKAGES,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return done.stdout


def test_without_a_compiler_the_reference_serves_after_one_warning(tmp_path):
    output = _run(CXX="no-such-compiler", MULTILORA_KERNELS_CACHE=str(tmp_path))
    assert output.count("[[[6.0, 6.0]]]") == 2
    assert output.count("WARNING") == 1
    assert "reference serves" in output
    assert "No compiled CPU kernels" in output
    assert output.splitlines()[-1] == "False"


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(tmp_path):
    (tmp_path / "file").touch()
    output = _run(MULTILORA_KERNELS_CACHE=str(tmp_path / "file"))
    assert output.count("[[[6.0, 6.0]]]") == 2
    assert output.count("WARNING") == 1


def test_a_prebuilt_library_is_loaded_without_a_compiler(tmp_path):
    library = Path(build.load_library().__file__ or "")
    (tmp_path / library.parent.name).mkdir()
    (tmp_path / library.parent.name / library.name).symlink_to(library)
    output = _run(CXX="no-such-compiler", PATH="", MULTILORA_KERNELS_CACHE=str(tmp_path))
    assert output.splitlines() == ["[[[6.0, 6.0]]]", "[[[6.0, 6.0]]]", "True"]


def test_the_library_of_a_wheel_is_loaded_before_one_of_the_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    monkeypatch.setattr(build, "_load", lambda library: library)
    in_cache = build.load_library()
    in_wheel = tmp_path / in_cache.parent.name / in_cache.name
    in_wheel.parent.mkdir()
    in_wheel.touch()
    assert build.load_library() == in_wheel != in_cache


def test_the_key_of_the_cache_changes_with_every_source_and_flag(monkeypatch, tmp_path):
    for name in ("a.cpp", "b.h"):
        (tmp_path / name).write_text("1")
    monkeypatch.setattr(build, "_FOLDER", tmp_path)
    digests = [build._digest()]
    for name in ("a.cpp", "b.h"):
        (tmp_path / name).write_text("2")
        digests.append(build._digest())
    monkeypatch.setattr(build, "_FLAGS", [*build._FLAGS, "-g"])
    digests.append(build._digest())
    assert len(set(digests)) == 4


def test_no_standard_header_is_compiled_for_an_instruction_set():
    # The linker may keep that copy of a function for all processors, and GCC 13 refuses std::vector there.
    sources = [path for path in build._FOLDER.glob("*.cpp") if "\nMULTILORA_TARGET(" in path.read_text()]
    assert sources
    for path in sources:
        before, after = path.read_text().split("\nMULTILORA_TARGET(", 1)
        own: set[str] = set()
        standard = _standard_headers(before, own)
        assert _standard_headers(after, own) <= standard, path.name


def _standard_headers(text: str, own: set[str]) -> set[str]:
    """Those that a text includes, through headers of ours too, which `own` gathers."""
    found = set(re.findall(r"#include <(.+)>", text))
    for name in re.findall(r'#include "(.+)"', text):
        if name not in own:
            own.add(name)
            found |= _standard_headers((build._FOLDER / name).read_text(), own)
    return found


def test_a_library_is_bound_to_no_release_of_torch_or_python():
    path = Path(build.load_library().__file__ or "")
    library = path.read_bytes()
    stable = {b"_Py_NoneStruct", b"_Py_TrueStruct", b"_Py_FalseStruct", b"_Py_Dealloc", b"_Py_IncRef", b"_Py_DecRef"}
    assert set(re.findall(rb"\0(_Py\w*)", library)) <= stable
    assert b"PyObject_CallNoArgs\0" in library  # so names are found like this
    assert not re.search(rb"_ZNK?(?:2at|3c10|5torch)|libc10|libtorch_python", library)


def test_regions_run_in_the_threads_of_torch():
    # A second OpenMP would be a second library of its kind in the process.
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    assert build.load_library().capability()
    now = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    assert loaded == now


def test_processes_that_start_together_compile_once(monkeypatch, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    library = tmp_path / "key" / "library.so"

    def appears_while_waiting_for_the_lock(path):
        library.touch()
        return real_lock(path)

    real_lock = build._locked
    monkeypatch.setattr(build, "_locked", appears_while_waiting_for_the_lock)
    monkeypatch.setattr(build, "_compiler", lambda: pytest.fail("it compiles"))
    build._build_once(library)
    assert not caplog.records


def test_a_failed_build_says_what_the_compiler_said_and_leaves_nothing_to_load(monkeypatch, tmp_path):
    monkeypatch.setenv("MULTILORA_KERNELS_CACHE", str(tmp_path / "cache"))
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho no space >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", f"env {compiler}")  # a compiler behind another program, as behind ccache
    with pytest.raises(build.BuildError, match="no space"):
        build.load_library()
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".so", ".o")]


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"MULTILORA_KERNELS_CACHE": "/k", "MULTILORA_CACHE": "/m"}, "/k"),
        ({"MULTILORA_CACHE": "/m", "XDG_CACHE_HOME": "/x"}, "/m/kernels"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/multilora/kernels"),
        ({}, "/h/.cache/multilora/kernels"),
    ],
)
def test_the_cache_is_where_the_environment_says(monkeypatch, environ, folder):
    for name in ("MULTILORA_KERNELS_CACHE", "MULTILORA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/h", **environ}.items():
        monkeypatch.setenv(name, value)
    assert str(build._cache_folder()) == folder
