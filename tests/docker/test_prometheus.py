"""The alert rules fire when they should: promtool carries out alerts_test.yml."""

import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("arguments", [["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]])
def test_promtool_accepts_the_alerts(arguments: list[str]) -> None:
    command = [REPOSITORY / "scripts" / "deployment" / "prometheus", "promtool", *arguments]
    settings = REPOSITORY / "docker" / "prometheus"
    result = subprocess.run(command, cwd=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert result.returncode == 0, result.stdout
