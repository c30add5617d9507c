"""The packages that most people ask with, before the real server: they return the values that the front sends."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from support import openai_packages
from support.openai_front import openai_front
from support.openai_packages.front import ADAPTER, Front

from multilora_client import Adapter
from multilora_client.openai.catalogue import Catalogue
from multilora_engine.tritonserver import ServerProcess

INSTALLED = ("openai_sdk", "litellm_package", "langchain_package")


@pytest.fixture(scope="module")
def front(server: ServerProcess, pirate: Adapter) -> Iterator[Front]:
    with openai_front(Catalogue("base", {ADAPTER: pirate}), server.grpc_url) as url:
        yield Front(url)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """litellm asks for a list of prices when it is imported, unless it is told to take its own."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")


def modes(module: str) -> list[str]:
    """The public functions of a module, read from its source: importing the packages takes seconds."""
    functions = ast.parse((Path(openai_packages.__file__).parent / f"{module}.py").read_text()).body
    return [node.name for node in functions if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]


@pytest.mark.parametrize(("module", "mode"), [(module, mode) for module in INSTALLED for mode in modes(module)])
def test_a_package_and_the_front_understand_each_other(front: Front, module: str, mode: str) -> None:
    getattr(import_module(f"support.openai_packages.{module}"), mode)(front)
