from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from multilora_engine.config import path_parameters
from multilora_engine.errors import ConfigError
from multilora_engine.tritonserver.repository import (
    find_model_repository,
    model_names,
    parse_override,
    with_absolute_paths,
    write_overridden,
)

GENERATION = """
backend: "python"  # a comment
max_batch_size: 64
model_transaction_policy { decoupled: true }
parameters { key: "max_loras" value: { string_value: "32" } }
parameters: [ { key: "model_path", value: { string_value: "${MULTILORA_MODEL}" } } ]
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, config in {"generation": GENERATION, "ensemble": 'platform: "ensemble"'}.items():
        version = tmp_path / "repository" / name / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(config)
        (version / "model.py").write_text(name)
    return tmp_path / "repository"


def test_an_override_changes_one_parameter_of_a_copy_and_nothing_else(repository: Path, tmp_path: Path) -> None:
    copy = write_overridden(repository, {"max_loras": 'a "b" \\ c'}, tmp_path / "copy")
    expected = text_format.Parse(GENERATION, ModelConfig())
    expected.parameters["max_loras"].string_value = 'a "b" \\ c'
    assert text_format.Parse((copy / "generation" / "config.pbtxt").read_text(), ModelConfig()) == expected
    assert (copy / "generation" / "1" / "model.py").read_text() == "generation"
    assert (copy / "ensemble" / "1" / "model.py").read_text() == "ensemble"
    assert (repository / "generation" / "config.pbtxt").read_text() == GENERATION


def test_an_unknown_parameter_is_refused_with_the_known_ones(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown parameter max_lora; known are: max_loras, model_path"):
        write_overridden(repository, {"max_lora": "1"}, tmp_path / "copy")


def test_a_broken_config_is_named_with_its_line(repository: Path, tmp_path: Path) -> None:
    (repository / "generation" / "config.pbtxt").write_text('backend: "python"\nmax_batch_sise: 64\n')
    with pytest.raises(ConfigError, match=r"generation/config\.pbtxt: 2:1 .*max_batch_sise"):
        write_overridden(repository, {}, tmp_path / "copy")


@pytest.mark.parametrize(("text", "pair"), [("a=1", ("a", "1")), ("a=", ("a", "")), ("a=b=c", ("a", "b=c"))])
def test_an_override_is_split_at_its_first_equals_sign(text: str, pair: tuple[str, str]) -> None:
    assert parse_override(text) == pair


@pytest.mark.parametrize("text", ["a", "=1", ""])
def test_an_override_without_name_or_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write --set NAME=VALUE"):
        parse_override(text)


def test_a_folder_without_models_is_no_repository(repository: Path, tmp_path: Path) -> None:
    assert model_names(repository) == ["ensemble", "generation"]
    assert find_model_repository(repository) == repository
    with pytest.raises(ConfigError, match="--model-repository"):
        find_model_repository(tmp_path)


def test_relative_paths_are_the_commands_and_not_the_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"lora_cache_dir": "cache", "api_keys_file": "${KEYS}", "tokenizer_path": "/t", "max_num_seqs": "4"}
    assert with_absolute_paths(given) == given | {"lora_cache_dir": str(tmp_path / "cache")}
    names = {"lora_cache_dir", "lora_prefetch_dir", "api_keys_file", "client_header_secret_file", "tokenizer_path"}
    assert set(path_parameters()) == names | {"model_path"}
