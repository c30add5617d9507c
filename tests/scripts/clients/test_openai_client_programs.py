from __future__ import annotations

from collections import Counter

import pytest
import yaml
from support.openai_modes import PACKAGES, modes, modules

from clients.openai_client_programs import LM_EVAL, OPENAI_PROGRAMS

TASKS = PACKAGES.parent / "lm_eval_tasks"


def tried(module: str) -> list[str]:
    """The modes of a module that rows try."""
    commands = [row.argv for row in OPENAI_PROGRAMS if f"openai_clients.{module}" in row.argv]
    return [mode for argv in commands for mode in argv[argv.index("http://{openai}/v1") + 1 :]]


@pytest.mark.parametrize("module", modules())
def test_every_mode_of_a_package_is_tried_by_one_row(module: str) -> None:
    assert modes(module)
    assert Counter(tried(module)) == Counter(modes(module))


def test_every_module_that_a_row_names_is_there() -> None:
    named = {word for row in OPENAI_PROGRAMS for word in row.argv if word.startswith("openai_clients.")}
    assert named == {f"openai_clients.{module}" for module in modules()}


def test_every_row_is_in_the_folder_of_its_programs_name() -> None:
    assert all(row.folder == row.program for row in OPENAI_PROGRAMS)


def test_every_task_of_lm_eval_is_there_and_finds_its_data() -> None:
    tasks = [yaml.safe_load(path.read_text()) for path in TASKS.glob("*.yaml")]
    named = [row.argv[row.argv.index("--tasks") + 1] for row in LM_EVAL if "--tasks" in row.argv]
    asked = {task for names in named for task in names.split(",")}
    assert {task["task"] for task in tasks} == asked
    for task in tasks:
        assert (TASKS.parent / task["dataset_kwargs"]["data_files"]["test"]).is_file()
