"""Which tests run, and fixtures for all of them."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis.internal.conjecture.providers import HypothesisProvider
from hypothesis.internal.constants_ast import Constants
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

_TESTS = Path(__file__).parent

LONGEST = (
    "e2e",
    "tests/e2e/test_faults.py",
    "tests/e2e/test_api_keys.py",
    "tests/e2e/test_abuse.py",
    "tests/kernels/test_interpreter.py",
    "tests/kernels/test_cpu.py",
    "tests/engine/test_parity.py",
    "tests/engine/process/test_supervisor.py",
    "tests/kernels/test_compiled_kernels.py",
)
"""The scopes of more than half a minute, by their times."""

OWN_SERVERS = tuple(
    f"tests/e2e/test_{name}.py"
    for name in (
        *("abuse", "api_keys", "conformance_encoders", "conformance_protocols", "conformance_unary"),
        *("disk_tier", "faults", "shutdown"),
    )
)
"""Files of e2e/ that have servers of their own: any process can run them."""

_HASH_SEED = os.environ.get("PYTHONHASHSEED", "")

SEED = int(_HASH_SEED) if _HASH_SEED.isdecimal() else 0
"""Of all random numbers of the tests. `scripts/test` sets it: without --all always the same, so that a failure means a
change."""

# An example's time says how busy the machine is. Without a database no example of an earlier run comes back.
hypothesis.settings.register_profile("repeatable", deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")
hypothesis.core.global_force_seed = SEED  # type: ignore[assignment]
# Hypothesis also draws from the constants of all modules that happen to be imported, in other orders in other runs.
assert hasattr(HypothesisProvider, "_local_constants")
HypothesisProvider._local_constants = Constants()  # type: ignore[method-assign, assignment]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="Run the tests that are marked `long`, too.")
    parser.addoption("--clients", help="Run clients' programs, too: a folder with their checkouts.")
    parser.addoption("--clients-python", default=sys.executable, help="With --clients: what runs programs in Python.")
    parser.addoption("--screenshots", action="store_true", help="With --all: draw the console's pictures anew.")


def pytest_report_header() -> str:
    return f"random numbers: PYTHONHASHSEED={SEED} before the command repeats them"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test draws does not depend on the tests before it."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `long`, without --all, and clients' programs, without --clients."""
    has_long, has_clients = config.getoption("--all"), config.getoption("--clients")
    left_out = {item for item in items if is_long(item) and not has_long}
    left_out |= {item for item in items if item.get_closest_marker("client_program") and not has_clients}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = sorted((item for item in items if item not in left_out), key=lambda item: place_of(item.nodeid))


def scope_of(nodeid: str) -> str:
    """The file of a test; one for all of e2e/ that ask one server."""
    file = nodeid.split("::", 1)[0]
    return "e2e" if file.startswith("tests/e2e/") and file not in OWN_SERVERS else file


def place_of(nodeid: str) -> int:
    """The tests that take longest come first: at the end, one process would wait for them."""
    scope = scope_of(nodeid)
    return LONGEST.index(scope) if scope in LONGEST else len(LONGEST)


class FilesStayTogether(LoadScopeScheduling):
    """The tests of a file, and those of e2e/ that ask one server, run in one process: they share servers and models."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FilesStayTogether | None:
    """None is the one that `--dist worksteal` asks for: on a GPU most tests wait for a compiler, best side by side."""
    return None if config.getoption("dist") == "worksteal" else FilesStayTogether(config, log)


def is_long(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("long")
    assert mark is None or mark.kwargs.get("reason"), f"{item.nodeid} is long and does not say why"
    return mark is not None


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """The tensors are small: on a busy machine threads that wait for each other take ten times as long as one."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def seed() -> int:
    """Of a test's own random numbers."""
    return SEED


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The checkpoint directory of the default base model; made on first use, which needs the network."""
    prepare = [sys.executable, "-m", "multilora_engine.quickstart.default_model"]
    done = subprocess.run(prepare, stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.splitlines()[-1])
