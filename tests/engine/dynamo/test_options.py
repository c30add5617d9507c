"""The command line of a worker."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("dynamo.common.backend", reason="ai-dynamo is not installed")

from multilora_engine.dynamo.options import parse_options


@pytest.mark.parametrize(("more", "expected"), [([], "replace"), (["--set", "lora_on_conflict=refuse"], "refuse")])
def test_a_name_moves_to_other_weights_unless_the_worker_is_told_to_refuse_them(
    default_model_dir: Path, more: list[str], expected: str
) -> None:
    options, _ = parse_options(["--model", str(default_model_dir), *more])
    assert options.engine.lora.lora_on_conflict == expected
    assert options.parameters["lora_on_conflict"] == expected


def test_the_help_tells_the_parameter_that_is_other_than_a_servers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "lora_on_conflict is replace unless it is set to refuse here" in told
