"""Rules of the tree that no tool checks."""

import ast
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MACHINE_PATH = re.compile(r"(?<![\w.$}])/(?:root|home|work|Users)/")
SHELL_SCRIPTS = sorted(path for path in (ROOT / "scripts").rglob("*") if path.is_file() and not path.suffix)
DISTRIBUTIONS = ("backend_src", "kernels", "client")

ROOMS = (
    *("quickstart", "dynamo", "serving", "tritonserver", "process", "quantize", "engine", "execution"),
    *("sampling", "sequences", "guides", "lora", "models", "text", "batch", "gguf"),
)
"""The rooms of the engine from top to bottom: each imports only rooms after it. Files in no room are the ground."""

UPWARD_IMPORTS = {
    ("multilora_engine.request", "multilora_engine.lora.names"),
}
"""Imports from a lower place to a higher one that are left."""

OWN_DECORATORS = {"property", "cached_property", "staticmethod", "classmethod", "contextmanager", "asynccontextmanager"}
"""Decorators that leave a function to our own callers; any other may hand it to a library."""

CALLED_BY_LIBRARIES = {
    *("finalize", "format_usage", "get_current_device", "has_ext_modules"),  # Triton, click, setuptools
    *(
        "attach_snapshot_publisher",
        "cleanup",
        "component_metrics_dp_ranks",
        "engine_control",
        "engine_update",
    ),  # Dynamo
    *("from_args", "health_check_payload", "kv_event_sources", "on_endpoint_ready", "register_prometheus"),
    *("supported_controls", "supported_updates"),
}

TRITON_MODELS = sorted((ROOT / "model_repository").glob("*/1/model.py"))


def tracked_files() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def text_of(path: Path) -> str:
    """The content of a text file; nothing for a binary one."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def definitions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """All functions, methods and classes of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node


def unused_names(root: Path, paths: list[Path]) -> set[str]:
    """The names of the distributions' definitions that no file outside of tests has besides.

    Definitions with other decorators than `OWN_DECORATORS` count as used.
    """
    users = [text_of(path) for path in paths if not path.is_relative_to(root / "tests")]
    num_uses = Counter(word for text in users for word in re.findall(r"\w+", text))
    sources = [path for path in paths if path.suffix == ".py" and path.relative_to(root).parts[0] in DISTRIBUTIONS]
    defined = [node for path in sources for node in definitions(path)]
    num_defined = Counter(node.name for node in defined)
    ours = {node.name for node in defined if {ast.unparse(each) for each in node.decorator_list} <= OWN_DECORATORS}
    return {name for name in ours if num_uses[name] <= num_defined[name] and not name.startswith("__")}


def module_name(path: Path, root: Path) -> str:
    """`multilora_engine.lora.layout` for its file; a package is named by its folder."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(path: Path, modules: set[str]) -> set[str]:
    """Which of `modules` a file imports anywhere, for its types, too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update(member if member in modules else node.module for member in members)
    return found & modules


def import_graph(distribution: str) -> dict[str, set[str]]:
    """For each module of a distribution the modules of it that it imports."""
    root = ROOT / distribution
    paths = {module_name(p, root): p for p in tracked_files() if p.suffix == ".py" and p.is_relative_to(root)}
    return {name: imported_modules(path, set(paths)) - {name} for name, path in paths.items()}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_modules_do_not_import_each_other_in_a_circle(distribution: str) -> None:
    try:
        TopologicalSorter(import_graph(distribution)).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def height(module: str) -> int:
    """How high a module of the engine lies: 0 is the ground, the files that are in no room."""
    _, room, *_ = [*module.split("."), ""]
    return len(ROOMS) - ROOMS.index(room) if room in ROOMS else 0


def test_every_room_of_the_engine_has_its_place() -> None:
    folders = (ROOT / "backend_src" / "multilora_engine").glob("*/__init__.py")
    assert {path.parent.name for path in folders} == set(ROOMS)


def test_rooms_import_only_rooms_below_them() -> None:
    imports = [(name, found) for name, modules in import_graph("backend_src").items() for found in modules]
    upward = {(name, found) for name, found in imports if height(name) < height(found)}
    assert upward == UPWARD_IMPORTS


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_every_package_says_what_its_files_are_for(distribution: str) -> None:
    for package in (path for path in tracked_files() if path.name == "__init__.py"):
        if not package.is_relative_to(ROOT / distribution):
            continue
        files = [path for path in package.parent.glob("*.py") if not path.stem.startswith("__")]
        parts = {path.stem for path in files} | {path.parent.name for path in package.parent.glob("*/__init__.py")}
        named = re.findall(r"\w+", ast.get_docstring(ast.parse(package.read_text())) or "")
        assert parts - set(named) == set(), package.relative_to(ROOT)


def test_every_function_and_class_is_used_outside_of_tests() -> None:
    assert unused_names(ROOT, tracked_files()) - CALLED_BY_LIBRARIES == set()


def test_a_function_for_tests_alone_is_found(tmp_path: Path) -> None:
    sources = {
        "backend_src/engine.py": "class Engine:\n def step(self): ...\n def adapter_digest(self): ...\n",
        "client/routes.py": "@router.get('/')\ndef answer(): ...\n",
        "scripts/bench.py": "Engine().step()\n",
        "tests/test_engine.py": "Engine().adapter_digest()\n",
    }
    for name, source in sources.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(source)
    assert unused_names(tmp_path, [tmp_path / name for name in sources]) == {"adapter_digest"}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_distribution_folder_is_no_package_itself(distribution: str) -> None:
    # transformers probes for a package named `kernels` and breaks on one that is not huggingface/kernels.
    assert (ROOT / distribution / "pyproject.toml").is_file()
    assert not (ROOT / distribution / "__init__.py").exists()


def test_no_file_names_a_path_of_some_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in tracked_files()
        for line in text_of(path).splitlines()
        if MACHINE_PATH.search(line) and path != Path(__file__)
    ]
    assert found == []


@pytest.mark.parametrize("model", TRITON_MODELS, ids=lambda path: path.parts[-3])
def test_a_triton_model_is_one_import(model: Path) -> None:
    statements = ast.parse(model.read_text()).body
    code = [statement for statement in statements if not isinstance(statement, ast.Expr)]
    assert [type(statement) for statement in code] == [ast.ImportFrom]


def test_there_are_triton_models() -> None:
    assert TRITON_MODELS


@pytest.mark.parametrize("script", SHELL_SCRIPTS, ids=lambda path: path.name)
def test_a_shell_script_can_be_executed(script: Path) -> None:
    assert script.read_text().startswith("#!/usr/bin/env bash\n")
    assert os.access(script, os.X_OK)


def test_every_test_that_the_threat_model_names_exists() -> None:
    named = re.findall(r"`(tests/\S+?\.py)::(test_\w+)`", (ROOT / "SECURITY.md").read_text())
    assert len(named) > 20
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / path).is_file() or f"def {name}(" not in (ROOT / path).read_text()
    ]
    assert missing == []


@pytest.mark.parametrize("section", ["What a client cannot do", "What is checked of files"])
def test_every_claim_of_the_threat_model_has_a_test(section: str) -> None:
    text = (ROOT / "SECURITY.md").read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    _, _, *claims = [line for line in text.splitlines() if line.startswith("|")]
    assert claims
    assert [claim for claim in claims if "::test_" not in claim] == []
