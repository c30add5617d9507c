"""What a front asks Dynamo's real runtime for, in a process of its own, because a runtime leaves threads behind."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.adapters import TINY
from support.fake_engine import INFO

from multilora_engine.dynamo.fleet_messages import Described
from multilora_engine.errors import ConfigError

pytest.importorskip("dynamo.common.backend", reason="ai-dynamo is not installed")

SCRIPT = """
import asyncio

import uvloop
from dynamo._core import Context
from dynamo.runtime import DistributedRuntime

from multilora_engine.dynamo.relay_process import open_link


async def answer(request, context=None):
    yield {"asked": request["number"]}


async def ask(link, number):
    async with asyncio.timeout(20):
        while not (ids := link.client.instance_ids()):
            await asyncio.sleep(0.05)
        chunks = await link.client.direct({"number": number}, ids[0], annotated=False, context=Context())
        return [chunk async for chunk in chunks]


async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    serving = asyncio.ensure_future(runtime.endpoint("fleet.backend.generate").serve_endpoint(answer))
    for number in range(3):
        link = await open_link("fleet.backend.generate", 16)
        print(await ask(link, number), flush=True)
        link.close()
    serving.cancel()


uvloop.run(main())
"""


def test_one_link_after_the_other_finds_the_workers_in_one_process(tmp_path: Path) -> None:
    environ = {
        **os.environ,
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(tmp_path),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
        "DYN_EVENT_PLANE_HOST": "127.0.0.1",
        "DYN_LOG": "error",
    }
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    answers = [line for line in done.stdout.splitlines() if line.startswith("[{")]
    assert answers == [f"[{{'asked': {number}}}]" for number in range(3)], done.stdout + done.stderr


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "int8"},
        {"vocab_size": 7},
        {"version": "9.9"},
        {"adapter_layout": replace(TINY, checkpoint="of other weights")},
        {"adapter_layout": replace(TINY, max_rank=7)},
    ],
)
def test_workers_that_would_answer_differently_are_no_fleet(change: dict[str, Any]) -> None:
    from multilora_engine.dynamo.relay_process import check_alike

    one = Described(INFO, "model", 16)
    check_alike([one, Described(replace(INFO, model_path="/elsewhere"), "model", 16)])
    with pytest.raises(ConfigError, match="2 different models, or with different parameters"):
        check_alike([one, Described(replace(INFO, **change), "model", 16), one])
    with pytest.raises(ConfigError, match="2 different models"):
        check_alike([one, Described(INFO, "model", 32)])
