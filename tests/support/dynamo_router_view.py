"""A program: publishes block events of ours through Dynamo and says what its router then knows.

Argument: a checkpoint's directory. Standard input: a list of `BlockEvent`, as JSON. Standard output: for each block of
the router the hash of its tokens, by the number that it is known by. With a process of its own Dynamo's runtime, which
does not end, ends with it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import msgspec
from dynamo.llm import (
    KvEventPublisher,
    KvRouter,
    KvRouterConfig,
    ModelInput,
    ModelType,
    WorkerType,
    register_model,
)
from dynamo.runtime import DistributedRuntime

from multilora_engine.dynamo.reports import BlockPublisher
from multilora_engine.engine.block_events import BlockEvent, BlockStored

BLOCK_SIZE = 16
LOOK_INTERVAL_S = 0.05


async def nothing(_request: Any, _context: Any) -> Any:
    yield {}


async def main() -> None:
    events = msgspec.json.decode(sys.stdin.buffer.read(), type=list[BlockEvent])
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    endpoint = runtime.endpoint("test.worker.generate")
    serving = asyncio.ensure_future(endpoint.serve_endpoint(nothing))
    await register_model(
        ModelInput.Tokens,
        ModelType.Completions,
        endpoint,
        sys.argv[1],
        "model",
        worker_type=WorkerType.Aggregated,
        kv_cache_block_size=BLOCK_SIZE,
    )
    dynamo_publisher = KvEventPublisher(endpoint, kv_block_size=BLOCK_SIZE, enable_local_indexer=True)
    router = KvRouter(endpoint, BLOCK_SIZE, KvRouterConfig())
    publisher = BlockPublisher()
    publisher.start(dynamo_publisher)
    publisher.on_events(events)
    known: dict[int, int] = {}
    while len(known) != sum(isinstance(event, BlockStored) for event in events):
        known = blocks_of(json.loads(await router.dump_events()))
        await asyncio.sleep(LOOK_INTERVAL_S)
    sys.stdout.write(json.dumps(known) + "\n")
    sys.stdout.flush()
    assert not serving.done()
    os._exit(0)


def blocks_of(dump: list[dict[str, Any]]) -> dict[int, int]:
    stored = [event["event"]["data"]["stored"] for event in dump]
    return {block["block_hash"]: block["tokens_hash"] for event in stored for block in event["blocks"]}


asyncio.run(main())
