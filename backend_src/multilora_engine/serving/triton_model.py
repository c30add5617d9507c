"""The Python models `generation` and `generation_unary`, and those of upstream's names: doors to one engine.

Decoupled ones, as Triton calls them, stream; HTTP infer and unary gRPC refuse such models, hence the others.
`generation` starts the engine and has all parameters; the other models find it, since one server is the parent of all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from multilora_engine.config import EngineConfig
from multilora_engine.errors import ConfigError
from multilora_engine.process.paths import ENGINE_MODULE, RELAY_MODULE, owned_socket_path, socket_path
from multilora_engine.process.supervisor import EngineProcess, engine_command
from multilora_engine.serving.front import EngineLink
from multilora_engine.serving.generation_front import GenerationFront
from multilora_engine.serving.inputs import ENSEMBLE_NAMES
from multilora_engine.serving.llmapi import LlmapiFront
from multilora_engine.serving.metrics import MetricsPublisher
from multilora_engine.serving.replies import Responder
from multilora_engine.serving.senders import read_key_ring, read_proxy_secret
from multilora_engine.serving.triton_api import TritonRequest, prepare_stub
from multilora_engine.serving.vllm import VllmFront
from multilora_engine.tritonserver.installation import check_free_space
from multilora_wire.layout import adapter_pages

_FIRST_CONTACT_S = 30.0


class GenerationModel:
    """Owns the engine. A request may get any number of responses."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Start the engine. Raises ConfigError, whose one line the operator sees."""
        prepare_stub(args["model_name"])
        if not _is_decoupled(args):
            raise ConfigError("generation streams its answers: write model_transaction_policy { decoupled: true }")
        parameters = _parameters(args)
        config = EngineConfig.from_parameters(parameters)
        if config.api_keys_file is not None:
            read_key_ring(config.api_keys_file)  # better now than at the first request
        if config.client_header_secret_file is not None:
            read_proxy_secret(config.client_header_secret_file)
        environ = engine_environ(args, config, os.environ)
        with ExitStack() as resources:
            path = resources.enter_context(owned_socket_path(os.getppid()))
            command = engine_command(RELAY_MODULE if config.is_fleet else ENGINE_MODULE)
            engine = EngineProcess(parameters, path, environ, command, config.engine_hang_timeout_s)
            resources.callback(engine.close)
            engine.start()
            link = EngineLink(path, _model_names(args))
            resources.callback(link.close)
            layout = link.client.wait_until_ready(_FIRST_CONTACT_S).adapter_layout
            check_free_space(adapter_pages(layout, layout.max_rank) * layout.page_bytes)
            if not config.is_fleet:  # whose workers have metrics of their own
                metrics = MetricsPublisher(link.client, lambda: engine.generation - 1, config.model_path.name)
                resources.callback(metrics.close)
            self._front = GenerationFront(link, can_stream=True)
            resources.callback(self._front.close)
            self._resources = resources.pop_all()

    def execute(self, requests: list[TritonRequest]) -> None:
        for request in requests:
            self._front.accept(request)

    def finalize(self) -> None:
        self._resources.close()


class DoorModel:
    """A further door to the engine of `generation`, with the same tensors.

    Unless it is decoupled a request gets one response, sent when it is complete: the server takes further requests
    meanwhile.
    """

    def initialize(self, args: Mapping[str, str]) -> None:
        prepare_stub(args["model_name"])
        self._link = EngineLink(socket_path(os.getppid()), _model_names(args))
        self._front = self._make_front(self._link, _is_decoupled(args))

    def execute(self, requests: list[TritonRequest]) -> None:
        for request in requests:
            self._front.accept(request)

    def finalize(self) -> None:
        self._front.close()
        self._link.close()

    def _make_front(self, link: EngineLink, can_stream: bool) -> GenerationFront:
        return GenerationFront(link, can_stream)


class TextDoorModel(DoorModel):
    """A door with the ensemble's tensors: the ensemble in one step, which makes it cancellable."""

    def _make_front(self, link: EngineLink, can_stream: bool) -> GenerationFront:
        make_responder = partial(Responder, has_flat_text=True)
        return GenerationFront(link, can_stream, renamed=ENSEMBLE_NAMES, make_responder=make_responder)


class LlmapiModel(DoorModel):
    """A door with the tensors of NVIDIA's recipe of the LLM API."""

    def _make_front(self, link: EngineLink, can_stream: bool) -> GenerationFront:
        return LlmapiFront(link, can_stream)


class VllmModel(DoorModel):
    """A door with the tensors of Triton's vLLM backend."""

    def _make_front(self, link: EngineLink, can_stream: bool) -> GenerationFront:
        return VllmFront(link, can_stream)


def engine_environ(args: Mapping[str, str], config: EngineConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """The engine's environment: an instance on a GPU sees only that one, and `device: auto` on a CPU instance none.

    An instance of KIND_MODEL leaves it to the parameter `device` and sees them all.
    """
    if args["model_instance_kind"] == "GPU":
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        device_id = int(args["model_instance_device_id"])
        return {**environ, "CUDA_VISIBLE_DEVICES": visible.split(",")[device_id] if visible else str(device_id)}
    if args["model_instance_kind"] == "CPU" and config.device == "auto":
        return {**environ, "CUDA_VISIBLE_DEVICES": ""}
    return dict(environ)


def _model_names(args: Mapping[str, str]) -> set[str]:
    """The names of Triton's models in the repository of this one: an ensemble's request comes without its name."""
    with suppress(OSError):
        return {args["model_name"], *os.listdir(Path(args["model_repository"]).parent)}
    return {args["model_name"]}


def _is_decoupled(args: Mapping[str, str]) -> bool:
    policy = json.loads(args["model_config"]).get("model_transaction_policy", {})
    return bool(policy.get("decoupled", False))


def _parameters(args: Mapping[str, str]) -> dict[str, str]:
    parameters = json.loads(args["model_config"])["parameters"]
    return {name: value["string_value"] for name, value in parameters.items()}
