"""The report of a GPU in its dry run: tiny shapes in Triton's interpreter."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from support.gpu_path import kernels_by_plain_torch
from support.plain_operators import PLAIN_OPERATORS

from gpu import parts, report, tuning_parts
from gpu.machine import Row
from multilora_engine.process.liveness import wait_for_end
from multilora_kernels import cuda, interpreter, self_test
from multilora_kernels.comparisons import Comparison
from multilora_kernels.cuda import block_sizes
from multilora_kernels.segments import ROWS
from repository import REPOSITORY


@pytest.fixture(autouse=True)
def paths(monkeypatch):
    folders = ("scripts", "kernels", "backend_src", "client")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(REPOSITORY / folder) for folder in folders))


def test_the_report_has_what_was_found_whatever_ends_early(tmp_path, monkeypatch):
    monkeypatch.setitem(report.PARTS, "self_test", 0.01)
    results = report.report(["limits", "self_test"], tmp_path, 60, is_dry=True)
    assert results["limits"].end == "done"
    assert results["self_test"].end == "stopped after 0 s"
    content = json.loads((tmp_path / "gpu_report.json").read_text())
    assert [part["name"] for part in content["parts"]] == ["limits", "self_test"]
    rows = {row["what"] for row in content["parts"][0]["rows"]}
    assert {"memory bandwidth", "host to device", "device to host"} <= rows
    text = (tmp_path / "gpu_report.md").read_text()
    assert "## limits: done" in text
    assert "| memory bandwidth | 1 | GB/s |" in text


def test_a_part_that_fails_says_why_and_one_without_time_that_it_had_none(tmp_path, monkeypatch):
    monkeypatch.setitem(report.PARTS, "nonsense", 60)
    assert "KeyError: 'nonsense'" in report.run_part("nonsense", 60, True, tmp_path / "log").end
    assert "Traceback" in (tmp_path / "log").read_text()
    assert report.report(["limits"], tmp_path, 0, is_dry=True)["limits"].end.startswith("not started")


@pytest.mark.parametrize(
    ("end", "told"), [("time.sleep(60)", "stopped after 1 s"), ("pass", "done"), ("sys.exit(3)", "failed")]
)
def test_what_a_part_has_started_ends_with_it_in_whatever_session(tmp_path, end, told):
    script = f"""
import subprocess, sys, time
child = subprocess.Popen(["sleep", "60"], start_new_session=True, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
{end}
"""
    log, command = tmp_path / "log", [sys.executable, "-c", script]
    found = report.run_processes("part", [command], os.environ, 1.0, log, tmp_path / "rows")
    assert found.end.startswith(told)
    assert wait_for_end(int(log.read_text()), 10)


def test_parts_that_need_kernels_of_the_cpu_wait_for_them_and_say_if_they_do_not_compile(tmp_path, monkeypatch):
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho no such instruction >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(report, "run_part", lambda name, *_: report.PartResult(name, "done"))
    assert report.report(["limits", "self_test"], tmp_path, 60, is_dry=False)["self_test"].end == "done"
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("MULTILORA_KERNELS_CACHE", str(tmp_path / "cache"))
    results = report.report(["limits", "self_test"], tmp_path, 60, is_dry=False)
    assert results["limits"].end == "done"
    assert results["self_test"].end.startswith("not started: the CPU's kernels do not compile")
    assert "no such instruction" in (tmp_path / report.LOGS / report.CPU_KERNELS_LOG).read_text()


def test_wheels_that_this_python_lacks_are_named_with_the_parts_that_fail_for_them(monkeypatch):
    monkeypatch.setattr(report, "NEEDED", {"json": ("limits",), "no_such_module": ("tests", "steps_1b")})
    monkeypatch.setattr(report, "WHEELS", {"no_such_module": "no-such-wheel"})
    assert report.missing_wheels() == {"no-such-wheel": ("tests", "steps_1b")}
    assert "no-such-wheel (parts: tests, steps_1b)" in report.describe_missing()


def test_a_machine_without_a_compiler_is_told_so(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    assert [tool for tool in report.missing_tools() if "compiler" in tool] == [
        "a C compiler (gcc, clang, or CC)",
        "a C++ compiler (c++, or CXX)",
    ]


_BARE = """
import runpy, sys
class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {lacking}:
            raise ModuleNotFoundError(f"No module named {{name}}", name=name)
sys.meta_path.insert(0, Lacking())
sys.argv = ["gpu.parts", *sys.argv[1:]]
runpy.run_module("gpu.parts", run_name="__main__")
"""


@pytest.mark.parametrize(("part", "error"), [("machine", None), ("prefill", "No module named msgspec")])
def test_a_part_needs_no_package_but_those_that_the_report_names(tmp_path, part, error):
    lacking = {name for name, parts in report.NEEDED.items() if "machine" not in parts} | {"rich", "typer", "pandas"}
    arguments = [part, str(tmp_path / "rows"), "0", "1", "--dry-run"]
    command = [sys.executable, "-c", _BARE.format(lacking=lacking), *arguments]
    environment = os.environ | interpreter.ENVIRONMENT
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert (error or "") in done.stdout
    assert (done.returncode == 0) == (error is None), done.stdout


_IMPORTS = """
import builtins, importlib.util, sys, torch
torch.cuda.is_available = lambda: True
imported, original = set(), builtins.__import__
def noting(name, globals=None, locals=None, fromlist=(), level=0):
    importer = (globals or {}).get("__file__") or ""
    if level == 0 and importer.startswith(sys.argv[1]) and "site-packages" not in importer:
        imported.add(name.partition(".")[0])
    return original(name, globals, locals, fromlist, level)
builtins.__import__ = noting
for number, file in enumerate(sys.argv[2:]):
    spec = importlib.util.spec_from_file_location(f"file{number}", file)
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])
print(*(imported - set(sys.stdlib_module_names)))
"""


@pytest.mark.long(reason="transformers and all else that tests import take seconds")
def test_the_packages_that_the_tests_of_a_gpu_import_are_named():
    tests = REPOSITORY / "tests"
    files = [*tests.glob("conftest.py"), *(tests / "kernels").glob("conftest.py")]
    files += [tests / f"{name}.py" for name in parts._TESTS]
    folders = [tests, REPOSITORY / "scripts", REPOSITORY / "client", REPOSITORY / "backend_src", REPOSITORY / "kernels"]
    command = [sys.executable, "-c", _IMPORTS, str(REPOSITORY), *map(str, files)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    own = {path.stem for folder in folders for path in folder.iterdir()}
    assert set(done.stdout.split()) - own <= report.NEEDED.keys()


def test_where_the_machine_fails_nothing_else_is_started(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "run_part", lambda name, *_: report.PartResult(name, "failed: no GPU"))
    results = report.report(["machine", "limits"], tmp_path, 60, is_dry=True)
    assert results["limits"].end == "not started: the part machine failed"


def test_a_folder_that_cannot_be_written_is_known_before_any_part_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "run_part", None)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        report.report(["limits"], tmp_path / "file" / "results", 60, is_dry=True)


def test_what_pytest_says_is_known_as_soon_as_it_says_it():
    lines = [
        "[gw0] [  1%] PASSED tests/kernels/test_cuda.py::test_one[a-b] ",
        "[gw1] [  2%] FAILED tests/kernels/test_cuda.py::test_two ",
        "tests/kernels/test_cuda.py::test_three PASSED [100%]",
        "FAILED tests/kernels/test_cuda.py::test_two - assert 1 == 2",
        "ERROR tests/engine/test_gpu.py - ModuleNotFoundError: No module named 'pydantic'",
        "=== 1 failed, 2 passed, 1 error in 3.00s ===",
    ]
    rows = list(parts._test_rows(f"{line}\n" for line in lines))
    assert [(row.what, row.note) for row in rows] == [
        ("failed", "tests/kernels/test_cuda.py::test_two"),
        ("failed", lines[3]),
        ("failed", lines[4]),
        ("passed", lines[5]),
    ]
    assert rows[-1].value == 2


def test_processes_share_every_comparison(monkeypatch):
    def comparisons(_shapes):
        for n in range(7):
            yield Comparison(f"operator {n}", "", lambda _generator: (torch.ones(1), torch.ones(1), 1e-9))

    monkeypatch.setattr(self_test, "comparisons", comparisons)
    made = [list(self_test.checked_operators(None, torch.device("cpu"), first, 3)) for first in range(3)]
    assert sorted(one.operator for each in made for one in each) == [f"operator {n}" for n in range(7)]


def test_a_wrong_operator_ends_the_part_with_its_error(monkeypatch):
    def wrong(gate_up):
        return PLAIN_OPERATORS["silu_mul"](gate_up) + 1

    rows = []
    with kernels_by_plain_torch(monkeypatch):
        monkeypatch.setattr(cuda, "silu_mul", wrong)
        monkeypatch.setattr(cuda, "gelu_tanh", None)
        machine = SimpleNamespace(
            is_dry=True, device=torch.device("cpu"), dtype=torch.bfloat16, process=0, num_processes=1
        )
        with pytest.raises(SystemExit, match="2 comparisons are wrong"):
            rows.extend(parts.self_test(machine))
    by_name = {row.what: row for row in rows}
    assert by_name["silu_mul"].note.count("WRONG")
    assert "TypeError" in by_name["gelu_tanh"].note


def test_what_was_tuned_serves_its_rank_alone_on_its_architecture(tmp_path, monkeypatch):
    plan = {"max_rank": 16, "max_width": 1 << 20, "sizes": {"BLOCK_N": 64, "num_warps": 8}}
    before = json.loads(report.TILES.read_text())
    entry = block_sizes.entry_with_plans("expand", "rows", 103, [plan])
    results = {
        "tuning": report.PartResult("tuning", rows=[dataclasses.asdict(Row(report.PLAN, note=json.dumps(entry)))])
    }
    report.write_report(results, "", tmp_path)
    table = tmp_path / report.TILES.name
    assert {name: json.loads(table.read_text())[name] for name in before} == before
    monkeypatch.setattr(block_sizes, "TABLE_PATH", table)
    monkeypatch.setattr(block_sizes, "_table", block_sizes._table.__wrapped__)
    default = before["default"]["expand"]["rows"]["BLOCK_N"]
    served = [
        block_sizes.block_sizes("expand", ROWS, rank, gpu, 4096, 64) for rank, gpu in ((16, 103), (17, 103), (16, 80))
    ]
    assert [(sizes["BLOCK_N"], sizes["num_warps"]) for sizes in served] == [(64, 8), (default, 4), (default, 4)]


def test_rows_are_taken_by_themselves_up_to_where_tiles_take_less_time():
    assert tuning_parts.most_rows({64: (3.0, 3.0), 16: (1.0, 2.0), 128: (5.0, 4.0), 256: (6.0, 9.0)}) == 64
    assert tuning_parts.most_rows({16: (2.0, 1.0), 32: (1.0, 2.0)}) == 0


def test_the_tests_of_a_gpu_are_there():
    assert all((REPOSITORY / "tests" / f"{name}.py").exists() for name in parts._TESTS)


@pytest.mark.long(reason="the interpreter takes a second for each kernel of a step")
def test_every_part_runs_from_the_command_line(tmp_path):
    command = [str(REPOSITORY / "scripts" / "gpu_report"), "--dry-run", "--output", str(tmp_path)]
    subprocess.run(command, env=os.environ | {"PYTHON": sys.executable}, check=True)
    parts = json.loads((tmp_path / "gpu_report.json").read_text())["parts"]
    assert [part["name"] for part in parts] == list(report.PARTS)
    assert all(part["rows"] for part in parts)


@pytest.mark.long(reason="the interpreter takes a second for each kernel")
def test_the_tuners_of_all_operators_run_dry(tmp_path):
    result = report.run_part("tuning", report.PARTS["tuning"], True, tmp_path / "log")
    assert result.end == "done", (tmp_path / "log").read_text()
    plans = [json.loads(row["note"])["sm_80"] for row in result.rows if row["what"] == report.PLAN]
    tuned = {
        (operator, regime): x["plans"][0] for plan in plans for operator, y in plan.items() for regime, x in y.items()
    }
    assert {("shrink", "rows"), ("expand", "rows"), ("update", "rows")} < tuned.keys()
    for operator, kind in itertools.product(("decode_attention", "prompt_attention"), ("16 bits", "8 bits")):
        assert tuned[operator, kind]["sizes"] == block_sizes.attention_sizes(operator, kind, 2, 16, 80)


def test_a_plan_has_the_quickest_tiles():
    few, many = ('{"BLOCK_K": 256, "num_warps": 4}', '{"BLOCK_K": 512, "num_warps": 4}')
    times = {
        ("shrink", 64): {few: 3.0, many: 4.0},
        ("shrink", 99): {few: 5.0, many: 4.0},
        ("expand", 64): {few: 2.0, many: 3.0},
        # With these alone many outputs at a time would not fit the other linears.
        ("expand", 99): {few: 2.5, many: 1.0},
    }
    table = {"BLOCK_K": 256, "num_warps": 4}.copy
    plan = {"max_rank": 16, "max_width": 64, "sizes": {}}
    assert tuning_parts.shrink_plans(times, [64, 99], lambda _: table()) == [
        plan,
        plan | {"max_width": 99, "sizes": {"BLOCK_K": 512}},
    ]
    assert [each["sizes"] for each in tuning_parts.expand_plans(times, [64, 99], lambda _: table())] == [
        {"BLOCK_K": 512}
    ]
