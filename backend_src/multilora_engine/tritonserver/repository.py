"""The model repository: finding it, and changing parameters of `generation` without touching it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig, ModelInstanceGroup

import multilora_engine
from multilora_engine.config import EngineConfig, path_parameters, unknown_parameters
from multilora_engine.errors import ConfigError
from multilora_engine.tritonserver.checkpoint import check_stub_opens

CONFIG_NAME = "config.pbtxt"

_FILES_OF_STUBS = ("model_path", "tokenizer_path", "api_keys_file", "client_header_secret_file")
"""Parameters with the paths that the processes of the Python backend open; the engine's own process opens any path."""

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
        if config.name not in ("", name):
            raise ConfigError(f"{path}: name is {config.name}, and the folder's is {name}; leave name out")
        program = config.default_model_filename or "model.py"
        if config.backend == "python" and not any((repository / name).glob(f"*/{program}")):
            raise ConfigError(f"{path.parent} has no 1/{program}, the program of the model")
        if any(group.kind == ModelInstanceGroup.KIND_GPU for group in config.instance_group) and not has_gpu():
            raise ConfigError(f"{path}: KIND_GPU, and there is no GPU; write KIND_AUTO, or KIND_CPU")
        for step in config.ensemble_scheduling.step:
            if (model := configs.get(step.model_name)) is None:
                raise ConfigError(f"{path}: {step.model_name} is a step, and there is no such model")
            if model.max_batch_size < config.max_batch_size:
                raise ConfigError(
                    f"{step.model_name}/{CONFIG_NAME}: max_batch_size is {model.max_batch_size}, and "
                    f"{config.max_batch_size} in {name}/{CONFIG_NAME}, of which the model is a step; write the same "
                    f"number in all of {', '.join(configs)}"
                )
        _check_tensors(name, config, configs)
    engine = configs.get(ENGINE_MODEL)
    if engine is not None and "model_path" in engine.parameters:
        values = {name: parameter.string_value for name, parameter in engine.parameters.items()}
        for name in _FILES_OF_STUBS:
            check_stub_opens(values.get(name, ""))
        EngineConfig.from_parameters(values, environ)


def _check_tensors(name: str, ensemble: ModelConfig, configs: Mapping[str, ModelConfig]) -> None:
    """Raises ConfigError where an ensemble and its steps do not have the same tensors, of the same types."""
    types: dict[str, tuple[str, int]] = {}

    def note(tensor: str, model: str, data_type: int) -> None:
        other, known = types.setdefault(tensor, (model, data_type))
        if data_type != known:
            raise ConfigError(
                f"{name}/{CONFIG_NAME}: tensor {tensor} is {DataType.Name(known)} in {other}, and "
                f"{DataType.Name(data_type)} in {model}"
            )

    for own in (*ensemble.input, *ensemble.output):
        note(own.name, name, own.data_type)
    for step in ensemble.ensemble_scheduling.step:
        model = configs[step.model_name]
        for kind, tensors, mapped in (
            ("input", model.input, step.input_map),
            ("output", model.output, step.output_map),
        ):
            types_of = {tensor.name: tensor.data_type for tensor in tensors}
            for key, value in sorted(mapped.items()):
                if key not in types_of:
                    raise ConfigError(
                        f"{name}/{CONFIG_NAME}: its step has an {kind} {key}, and {step.model_name}/{CONFIG_NAME} none"
                    )
                note(value, step.model_name, types_of[key])


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
