import shutil
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from multilora_engine.config import path_parameters
from multilora_engine.errors import ConfigError
from multilora_engine.tritonserver.repository import (
    check_configs,
    find_model_repository,
    model_names,
    parse_override,
    with_absolute_paths,
    write_overridden,
)
from multilora_engine.tritonserver.upstream_models import UpstreamModels, add_upstream_models

REPOSITORY = Path(__file__).parents[3]

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
    with pytest.raises(ConfigError, match=r"unknown parameter max_lora, did you mean max_loras\?"):
        write_overridden(repository, {"max_lora": "1"}, tmp_path / "copy")
    with pytest.raises(ConfigError, match="unknown parameter zzz "):
        write_overridden(repository, {"zzz": "1"}, tmp_path / "other copy")


def check(repository: Path, environ: dict[str, str] | None = None, has_gpu: bool = False) -> None:
    check_configs(repository, lambda: has_gpu, environ or {})


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ('backend: "python"\nmax_batch_sise: 64\n', "line 2: ModelConfig has no field max_batch_sise"),
        ('\nbackend: "python\nmax_batch_size: 64\n', "line 2: String missing ending quote"),
        ('input [\n  { name: "a"  dims: [ 1 ]\n', 'line 2: Expected "}"'),
        ("\n\ninput { data_type: TYPE_STRIN }", "line 3: Enum type .* has no value named TYPE_STRIN"),
        ('max_batch_size: "8"', "line 1: Couldn't parse integer"),
        ('name: "a"\nname: "b"', 'line 2: .* should not have multiple "name" fields'),
        ("parameters { keys: 1 }", "line 1: ParametersEntry has no field keys"),
    ],
)
@pytest.mark.parametrize("model", ["generation", "ensemble"])
def test_a_mistake_in_any_config_is_told_with_its_file_and_line(
    repository: Path, tmp_path: Path, model: str, text: str, mistake: str
) -> None:
    config = repository / model / "config.pbtxt"
    config.write_text(text)
    linked = write_overridden(repository, {}, tmp_path / "copy")
    with pytest.raises(ConfigError, match=rf"^{config}, {mistake}"):
        check(linked)


def test_a_config_that_is_no_text_is_refused(repository: Path) -> None:
    (repository / "ensemble" / "config.pbtxt").write_bytes(b'name: "\xff"')
    with pytest.raises(ConfigError, match=r"ensemble/config\.pbtxt: byte 7 is no UTF-8"):
        check(repository)


@pytest.mark.parametrize("upstream_models", UpstreamModels)
def test_our_own_repository_is_fine(tmp_path: Path, upstream_models: UpstreamModels) -> None:
    (tmp_path / "config.json").write_text("{}")
    linked = write_overridden(REPOSITORY / "model_repository", {"max_loras": "4"}, tmp_path / "linked")
    add_upstream_models(linked, upstream_models)
    check(linked, {"MULTILORA_MODEL": str(tmp_path)})


@pytest.mark.parametrize("size", [0, 8])
@pytest.mark.parametrize("model", ["generation", "preprocessing", "generation_unary"])
def test_a_batch_size_that_ensembles_do_not_have_is_refused(tmp_path: Path, model: str, size: int) -> None:
    repository = shutil.copytree(REPOSITORY / "model_repository", tmp_path / "repository")
    config = repository / model / "config.pbtxt"
    text = config.read_text()
    assert "max_batch_size: 64" in text
    config.write_text(text.replace("max_batch_size: 64", f"max_batch_size: {size}"))
    with pytest.raises(ConfigError, match=rf"^{model}/config\.pbtxt: max_batch_size is {size}, and 64 in ensemble"):
        check(repository)


@pytest.mark.parametrize(
    ("model", "text", "changed", "message"),
    [
        (
            "generation",
            '{ name: "seed"  data_type: TYPE_UINT64  dims: [ 1 ]  optional: true },',
            "",
            r"ensemble/config\.pbtxt: its step has an input seed, and generation/config\.pbtxt none",
        ),
        (
            "generation",
            '{ name: "seed"  data_type: TYPE_UINT64',
            '{ name: "seed"  data_type: TYPE_INT32',
            "ensemble/.*: tensor seed is TYPE_UINT64 in ensemble, and TYPE_INT32 in generation",
        ),
        (
            "ensemble",
            'model_name: "generation"',
            'model_name: "generaton"',
            "generaton is a step, and there is no such",
        ),
    ],
)
def test_tensors_that_an_ensemble_has_otherwise_than_its_steps_are_refused(
    tmp_path: Path, model: str, text: str, changed: str, message: str
) -> None:
    repository = shutil.copytree(REPOSITORY / "model_repository", tmp_path / "repository")
    config = repository / model / "config.pbtxt"
    assert text in config.read_text()
    config.write_text(config.read_text().replace(text, changed))
    with pytest.raises(ConfigError, match=message):
        check(repository)


def test_a_gpu_that_is_not_there_is_refused(repository: Path) -> None:
    config = repository / "generation" / "config.pbtxt"
    config.write_text('backend: "python"\ninstance_group [ { kind: KIND_GPU } ]')
    check(repository, has_gpu=True)
    with pytest.raises(ConfigError, match=rf"^{config}: KIND_GPU, and there is no GPU; write KIND_AUTO"):
        check(repository)


def test_a_model_under_another_name_or_without_its_program_is_refused(repository: Path) -> None:
    folder = repository / "generation"
    (folder / "config.pbtxt").write_text('name: "generaton"\nbackend: "python"')
    with pytest.raises(
        ConfigError, match=rf"^{folder}/config\.pbtxt: name is generaton, and the folder's is generation"
    ):
        check(repository)
    (folder / "config.pbtxt").write_text('name: "generation"\nbackend: "python"')
    check(repository)
    (folder / "1" / "model.py").unlink()
    with pytest.raises(ConfigError, match=rf"^{folder} has no 1/model\.py"):
        check(repository)


def test_values_of_parameters_are_checked_before_a_server_starts(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    environ = {"MULTILORA_MODEL": str(tmp_path)}
    check(write_overridden(repository, {"max_loras": "7"}, tmp_path / "good"), environ)
    with pytest.raises(ConfigError, match=r"^parameter max_loras='many': write a whole number"):
        check(write_overridden(repository, {"max_loras": "many"}, tmp_path / "bad"), environ)


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
