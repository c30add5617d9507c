"""The program that takes the place of the engine process if the parameter `engine` names a fleet.

`python -m multilora_engine.dynamo.relay_process` reads and reports as `multilora_engine.process.main` does, and ends
when its stdin does: the front that started it is gone. Dynamo's own variables (`DYN_DISCOVERY_BACKEND` and
others) say how it finds the fleet. It outlives an absence of discovery and of all workers, see fleet_connection.py.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import uvloop
import zmq
from dynamo._core import Context
from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeArgGroup, DynamoRuntimeConfig
from dynamo.llm import KvRouter, KvRouterConfig, RoutingConstraints
from dynamo.runtime import DistributedRuntime

from multilora_engine.config import LEAST_HOST_TIER_BYTES, EngineConfig
from multilora_engine.dynamo.fleet_aliases import FleetAliases
from multilora_engine.dynamo.fleet_connection import FleetConnection, Link
from multilora_engine.dynamo.fleet_messages import Describe, Described
from multilora_engine.dynamo.fleet_operations import FleetOperator
from multilora_engine.dynamo.fleet_router import FleetRouter
from multilora_engine.dynamo.front_uploads import FrontUploads
from multilora_engine.dynamo.relay import FleetRelay
from multilora_engine.dynamo.workers import Workers
from multilora_engine.engine_info import ClientPolicy, EngineInfo
from multilora_engine.errors import ConfigError, RequestError
from multilora_engine.log_lines import configure_logging
from multilora_engine.process.liveness import DrainOrder, Heartbeat
from multilora_engine.process.messages import (
    MAX_QUEUED_MESSAGES,
    Launch,
    Started,
    StartFailed,
    report_start,
    take_stdout,
)

_FLEET_TIMEOUT_S = 600.0
"""Workers may start after their front, and read gigabytes of weights before they are there."""

_LOOK_INTERVAL_S = 0.2

logger = logging.getLogger(__name__)


def main() -> None:
    """Read `Launch`, find the fleet, report, serve."""
    configure_logging("relay")
    report_stream = take_stdout()
    launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=Launch)
    try:
        uvloop.run(_serve(launch, lambda: report_start(report_stream, Started())))
    except ConfigError as error:
        report_start(report_stream, StartFailed(str(error)))
        raise SystemExit(1) from None


async def _serve(launch: Launch, on_ready: Any) -> None:
    """Serve until stdin ends. Raises ConfigError."""
    config = EngineConfig.from_parameters(launch.parameters)
    heartbeat = Heartbeat(launch.heartbeat_fd, launch.heartbeat_interval_s)
    runtime = _runtime()
    path_of_workers = ".".join(config.fleet_endpoint)
    endpoint = runtime.endpoint(path_of_workers)
    client = await endpoint.client()
    described = await _describe(Workers(client, Context), config.engine)
    info = front_info(described.info, config)
    first = Link(client, KvRouter(endpoint, described.block_size, KvRouterConfig()), runtime.shutdown)
    open_another = partial(open_link, path_of_workers, described.block_size)
    connection = FleetConnection(first, open_another, config.request_timeout_s)
    workers = Workers(connection, Context)
    router = FleetRouter(connection, workers, lambda taints: RoutingConstraints(preferred_taints=dict(taints)))
    layout = info.adapter_layout
    uploads_bytes = int(config.lora.lora_cache_host_memory_bytes) or LEAST_HOST_TIER_BYTES
    uploads = FrontUploads(workers, uploads_bytes, layout.lora_dtype)
    aliases = FleetAliases()
    operator = FleetOperator(workers, uploads, msgspec.structs.replace(described, info=info), aliases)
    await aliases.read_any(workers)
    path = Path(launch.socket_path)
    has_ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), has_ended.set)
    with closing(DrainOrder(path)) as drain, zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        signal.signal(signal.SIGTERM, drain.give)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
        socket.set(zmq.RCVHWM, 0)
        socket.set(zmq.ROUTER_MANDATORY, 1)
        socket.bind(f"ipc://{path}")
        with closing(FleetRelay(socket, workers, router, uploads, operator, info, drain)) as relay:
            relay.start()
            on_ready()
            logger.info("the fleet has %d workers", len(workers.ids))
            tasks = [loop.create_task(connection.keep()), loop.create_task(aliases.follow(workers))]
            await _beat_until(has_ended, heartbeat)
            for task in tasks:
                task.cancel()
    loop.remove_reader(sys.stdin.fileno())
    connection.close()


async def open_link(path_of_workers: str, block_size: int) -> Link:
    """A new runtime, while the process serves. It raises Dynamo's errors, which have no types.

    The constructor holds the whole process up while it waits for etcd: two minutes by default, in which the front would
    look like one that hangs.
    """
    os.environ["ETCD_STARTUP_CONNECT_TIMEOUT_SECONDS"] = "1"
    runtime = _runtime()
    with ExitStack() as failed:
        failed.callback(runtime.shutdown)
        endpoint = runtime.endpoint(path_of_workers)
        link = Link(await endpoint.client(), KvRouter(endpoint, block_size, KvRouterConfig()), runtime.shutdown)
        failed.pop_all()
    return link


def _runtime() -> Any:
    parser = argparse.ArgumentParser()
    DynamoRuntimeArgGroup().add_arguments(parser)
    options = DynamoRuntimeConfig.from_cli_args(parser.parse_args([]))
    try:
        options.validate()
    except ValueError as error:
        raise ConfigError(f"Dynamo's variables: {error}") from None
    loop, plane = asyncio.get_running_loop(), options.request_plane
    return DistributedRuntime(loop, options.discovery_backend, plane, event_plane=options.event_plane)


async def _describe(workers: Workers, fleet: str) -> Described:
    """The facts about the model, which all workers have in common. Raises ConfigError."""
    deadline = time.monotonic() + _FLEET_TIMEOUT_S
    while time.monotonic() < deadline:
        answers = await workers.ask_all(Describe())
        told = [answer for answer in answers if isinstance(answer, Described)]
        if told:
            check_alike(told)
            return told[0]
        for answer in answers:
            if isinstance(answer, RequestError):
                logger.warning("a worker does not say what it serves: %s", answer)
        await asyncio.sleep(_LOOK_INTERVAL_S)
    raise ConfigError(f"{fleet} has had no worker for {_FLEET_TIMEOUT_S:g} s; start multilora-dynamo, and see its log")


def check_alike(told: list[Described]) -> None:
    """Raises ConfigError unless the workers serve one checkpoint, compute in one type and store adapters alike."""
    facts = {_facts(one.info, one.block_size) for one in told}
    if len(facts) > 1:
        raise ConfigError(
            f"{len(told)} workers of the fleet serve {len(facts)} different models, or with different parameters; all "
            "need the same checkpoint, dtype, kv_cache_dtype, lora parameters and version"
        )


def _facts(info: EngineInfo, block_size: int) -> tuple[object, ...]:
    return info.vocab_size, info.adapter_layout, info.dtype, info.kv_cache_dtype, block_size, info.version


def front_info(info: EngineInfo, config: EngineConfig) -> EngineInfo:
    """The facts for the doors of a front: the model's are the workers', the requests' are the front's parameters."""
    return replace(
        info,
        model_path=str(config.model_path),
        tokenizer_path=str(config.tokenizer_path or config.model_path),
        add_special_tokens=config.add_special_tokens,
        exclude_input_in_output=config.exclude_input_in_output,
        special_tokens_in_messages=config.special_tokens_in_messages,
        clients=ClientPolicy.of(config),
    )


async def _beat_until(has_ended: asyncio.Event, heartbeat: Heartbeat) -> None:
    while not has_ended.is_set():
        heartbeat.beat()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(heartbeat.interval_s):
                await has_ended.wait()


if __name__ == "__main__":
    main()
