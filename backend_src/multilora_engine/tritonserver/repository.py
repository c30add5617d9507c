"""The model repository: finding it, and changing parameters of `generation` without touching it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

import multilora_engine
from multilora_engine.config import EngineConfig, path_parameters, unknown_parameters
from multilora_engine.errors import ConfigError

CONFIG_NAME = "config.pbtxt"

ENGINE_MODEL = "generation"
"""The model whose config.pbtxt holds the engine's parameters."""


def find_model_repository(given: Path | None = None) -> Path:
    """`given`, else the one of the clone or of the package, else the current directory's. Raises ConfigError."""
    package = Path(multilora_engine.__file__).parent
    folders = (package.parents[1], package, Path.cwd())
    candidates = [given] if given else [folder / "model_repository" for folder in folders]
    for candidate in candidates:
        if model_names(candidate):
            return candidate.absolute()
    tried = ", ".join(map(str, candidates))
    raise ConfigError(f"no model repository (folders with a {CONFIG_NAME}) at {tried}; give --model-repository")


def model_names(repository: Path) -> list[str]:
    """The models of `repository`, sorted."""
    return sorted(config.parent.name for config in repository.glob(f"*/{CONFIG_NAME}"))


def write_overridden(repository: Path, overrides: Mapping[str, str], target: Path) -> Path:
    """Make `target`, which is not there, a repository of links to `repository`, with `overrides` in the parameters of
    `generation`. Raises ConfigError for a name that its config.pbtxt does not have.
    """
    target.mkdir()
    for name in model_names(repository):
        if name != ENGINE_MODEL or not overrides:
            (target / name).symlink_to(repository / name)
    if overrides:
        _write_engine_model(repository / ENGINE_MODEL, overrides, target / ENGINE_MODEL)
    return target


def parse_override(text: str) -> tuple[str, str]:
    """`NAME=VALUE` as a pair. Raises ConfigError."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ConfigError(f"--set {text}: write --set NAME=VALUE")
    return name, value


def with_absolute_paths(overrides: Mapping[str, str]) -> dict[str, str]:
    """The same, with the files and directories that lie relative to this process: the server's is another directory."""
    paths = {name: value for name in path_parameters() if (value := overrides.get(name)) and not value.startswith("${")}
    return {**overrides, **{name: str(Path(value).expanduser().absolute()) for name, value in paths.items()}}


def _write_engine_model(source: Path, overrides: Mapping[str, str], target: Path) -> None:
    config = read_config(source / CONFIG_NAME)
    _override(config, overrides)
    target.mkdir()
    write_config(config, target / CONFIG_NAME)
    for entry in source.iterdir():
        if entry.name != CONFIG_NAME:
            (target / entry.name).symlink_to(entry)


def read_config(path: Path) -> ModelConfig:
    """Raises ConfigError, which names the file that a link leads to, and the line of a mistake."""
    path = path.resolve()
    try:
        return text_format.Parse(path.read_text(), ModelConfig())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is no UTF-8; save the file as UTF-8") from None
    except text_format.ParseError as error:
        raise ConfigError(f"{path}, line {error.GetLine()}: {_mistake(str(error))}") from None


def check_configs(repository: Path, has_gpu: Callable[[], bool], environ: Mapping[str, str]) -> None:
    """Raises ConfigError for what the server, or the engine's parameters, would refuse after other models have loaded.

    repository: one that the server will get. has_gpu: whether it sees a GPU; asked if a model needs one. environ: the
    server's.
    """
    configs = {name: read_config(repository / name / CONFIG_NAME) for name in model_names(repository)}
    for name, config in configs.items():
        path = (repository / name / CONFIG_NAME).resolve()
        if any(group.kind == ModelInstanceGroup.KIND_GPU for group in config.instance_group) and not has_gpu():
            raise ConfigError(f"{path}: KIND_GPU, and there is no GPU; write KIND_AUTO, or KIND_CPU")
        for step in config.ensemble_scheduling.step:
            stepped = configs.get(step.model_name)
            if stepped is not None and stepped.max_batch_size < config.max_batch_size:
                raise ConfigError(
                    f"{step.model_name}/{CONFIG_NAME}: max_batch_size is {stepped.max_batch_size}, and "
                    f"{config.max_batch_size} in {name}/{CONFIG_NAME}, of which the model is a step; write the same "
                    f"number in all of {', '.join(configs)}"
                )
    engine = configs.get(ENGINE_MODEL)
    if engine is not None and "model_path" in engine.parameters:
        values = {name: parameter.string_value for name, parameter in engine.parameters.items()}
        EngineConfig.from_parameters(values, environ)


def _mistake(text: str) -> str:
    """A mistake as protobuf's text format tells it, without its place and the line that it quotes."""
    text = re.sub(r"^\d+:\d+ : ('.*': )?", "", text, flags=re.DOTALL)
    return re.sub(r'^Message type "[\w.]*?(\w+)" has no field named "(.*)"\.$', r"\1 has no field \2", text)


def write_config(config: ModelConfig, path: Path) -> None:
    """Write a configuration in the text format, without comments."""
    path.write_text(text_format.MessageToString(config))


def _override(config: ModelConfig, overrides: Mapping[str, str]) -> None:
    known = sorted(config.parameters)
    if unknown := sorted(set(overrides) - set(known)):
        raise ConfigError(unknown_parameters(unknown, known))
    for name, value in overrides.items():
        config.parameters[name].string_value = value
