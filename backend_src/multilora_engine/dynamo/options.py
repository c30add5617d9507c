"""`WorkerOptions`: the command line of `multilora-dynamo`: the options of every worker of Dynamo, and a few more."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dynamo.common.backend import WorkerConfig
from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeArgGroup, DynamoRuntimeConfig
from dynamo.common.utils.runtime import parse_endpoint

from multilora_engine.config import EngineConfig
from multilora_engine.errors import ConfigError
from multilora_engine.tritonserver.checkpoint import resolve_checkpoint
from multilora_engine.tritonserver.repository import parse_override

_DEFAULT_PARAMETERS: Mapping[str, str] = {"lora_on_conflict": "replace"}
"""Loading a name again with other weights moves it to them; running requests keep the weights that they began with.

Dynamo's `load_lora` of a name that is loaded means this, and operators move adapters by it. A single server refuses.
"""

_DESCRIPTION = "Serve a model and its LoRA adapters as a worker of NVIDIA Dynamo."


@dataclass(frozen=True)
class WorkerOptions:
    """The options that a worker is started with.

    parameters: of the engine, as in the `parameters` of model_repository/generation/config.pbtxt. model_name: the
    clients' name for the base model. drain_timeout_s: the time for requests in flight to finish when the worker ends.
    sources_interval_s: how long after a look into `lora_sources` the next one comes.
    """

    parameters: Mapping[str, str]
    engine: EngineConfig
    model_name: str
    drain_timeout_s: float
    sources_interval_s: float


def parse_options(argv: Sequence[str] | None) -> tuple[WorkerOptions, WorkerConfig]:
    """The options of a command line, of this process if None. Raises ConfigError; argparse ends the process itself."""
    parser = argparse.ArgumentParser(prog="multilora-dynamo", description=_DESCRIPTION, allow_abbrev=False)
    model = os.environ.get("MULTILORA_MODEL")
    parser.add_argument(
        "--model",
        default=model,
        required=model is None,
        metavar="DIR_OR_HF_ID",
        help="Hugging Face checkpoint to serve (environment: MULTILORA_MODEL).",
    )
    parser.add_argument("--served-model-name", help="The clients' name for it (default: the name of its directory).")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="Set a parameter of model_repository/generation/config.pbtxt; repeatable. lora_on_conflict is replace "
        "unless it is set to refuse here, at every worker: other weights for a name or a task id take its place. What "
        "a front says of lora_on_conflict is not read.",
    )
    parser.add_argument(
        "--drain-timeout-secs",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="Time for requests in flight to finish once the worker is told to end (default: %(default)g). Others may "
        "go on with them: see --migration-limit of Dynamo's front.",
    )
    parser.add_argument(
        "--sources-interval-secs",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="How often to look for adapters that are new in lora_sources (default: %(default)g).",
    )
    DynamoRuntimeArgGroup().add_arguments(parser)
    arguments = parser.parse_args(argv)
    runtime = DynamoRuntimeConfig.from_cli_args(arguments)
    try:
        runtime.validate()
        endpoint = parse_endpoint(runtime.endpoint or f"{runtime.namespace}.backend.generate")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    options = _options(arguments)
    return options, _worker_config(runtime, endpoint, options)


def _options(arguments: argparse.Namespace) -> WorkerOptions:
    path = resolve_checkpoint(arguments.model)
    overrides = dict(map(parse_override, arguments.overrides))
    parameters = {**_DEFAULT_PARAMETERS, **overrides, "model_path": str(path)}
    engine = EngineConfig.from_parameters(parameters)
    if engine.is_fleet:
        raise ConfigError(f"engine is {engine.engine}: that is for the front of a fleet; a worker has an engine: local")
    return WorkerOptions(
        parameters,
        engine,
        arguments.served_model_name or path.name,
        arguments.drain_timeout_secs,
        arguments.sources_interval_secs,
    )


def _worker_config(
    runtime: DynamoRuntimeConfig, endpoint: tuple[str, str, str], options: WorkerOptions
) -> WorkerConfig:
    """structural_tag: None keeps the front from sending guides of that kind, which the engine does not have."""
    namespace, component, name = endpoint
    return WorkerConfig.from_runtime_config(
        runtime,
        model_name=str(options.engine.model_path),
        served_model_name=options.model_name,
        namespace=namespace,
        component=component,
        endpoint=name,
        structural_tag=None,
    )
