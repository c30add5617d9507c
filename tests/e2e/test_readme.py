"""The README's examples, run as printed but for the ports."""

import re
import subprocess
import sys
from pathlib import Path

from multilora_engine.tritonserver import ServerProcess

REPOSITORY = Path(__file__).parents[2]


def example(name: str, server: ServerProcess) -> str:
    """The code block after the mark `<!-- example: NAME -->`, at the ports of `server`."""
    readme = (REPOSITORY / "README.md").read_text()
    block = re.search(rf"<!-- example: {name} -->\n+```\w+\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    assert block is not None, f"README.md has no code block marked {name}"
    code = block[1].replace("localhost:8000", server.http_url).replace("localhost:8001", server.grpc_url)
    assert code != block[1], "the example names neither localhost:8000 nor localhost:8001"
    return code


def run(command: list[str]) -> str:
    """The output of `command` in the repository's root."""
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.strip(), result.stderr
    return result.stdout


def test_the_tritonclient_example_prints_an_answer(server: ServerProcess) -> None:
    run([sys.executable, "-c", example("tritonclient", server)])


def test_the_curl_example_prints_an_answer_and_no_error(server: ServerProcess) -> None:
    answer = run(["bash", "-euo", "pipefail", "-c", example("curl", server)])
    assert "text_output" in answer
    assert '"error"' not in answer
