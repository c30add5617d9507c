import os
import subprocess
import sys

import pytest

import multilora_client


@pytest.mark.parametrize("module", ["multilora_client", "multilora_client.cli", "multilora_client.openai.app"])
def test_the_client_never_imports_torch(module: str) -> None:
    """In a process of its own and without a terminal, since the tests themselves import torch."""
    script = f"import sys, {module}; assert 'numpy' in sys.modules; sys.exit('torch' in sys.modules)"

    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], stdin=subprocess.DEVNULL, env=environment, check=False)

    assert done.returncode == 0


def test_the_command_line_works_without_the_extras() -> None:
    extras = {"fastapi", "uvicorn", "pydantic", "matplotlib"}
    script = f"import sys, multilora_client.cli; sys.exit(bool({extras} & set(sys.modules)))"

    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], stdin=subprocess.DEVNULL, env=environment, check=False)

    assert done.returncode == 0


def test_all_lists_every_public_name_in_order() -> None:
    public = [name for name, value in vars(multilora_client).items() if not name.startswith("_")]
    modules = {name for name in public if type(getattr(multilora_client, name)).__name__ == "module"}

    assert sorted(multilora_client.__all__) == sorted(set(public) - modules)
