"""Outputs on their way from the thread of the engine's client to an event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from multilora_engine.dynamo.streams import OpenStreams, OutputStream
from multilora_engine.errors import EngineUnavailable, QueueFull, RelayedError, RequestError
from multilora_engine.process.messages import error_output
from multilora_engine.request import TokenOutput


class Client:
    """has_engine: what the client knows at the moment."""

    def __init__(self, has_engine: bool = True) -> None:
        self.has_engine = has_engine


def output(*token_ids: int) -> TokenOutput:
    return TokenOutput("r", list(token_ids), "")


def tell(stream: OutputStream, *outputs: TokenOutput) -> None:
    """What the client's thread does with the outputs that have come."""

    def run() -> None:
        for one in outputs:
            stream.on_output(one)
        stream.flush()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def test_outputs_come_over_in_order_and_pile_up_as_one() -> None:
    async def read() -> list[list[TokenOutput]]:
        stream = OutputStream(Client(), asyncio.get_running_loop())  # type: ignore[arg-type]
        tell(stream, output(1))
        first = await stream.next()
        tell(stream, output(2))
        tell(stream, output(3, 4), output(5))
        return [first, await stream.next()]

    assert [[one.token_ids for one in outputs] for outputs in asyncio.run(read())] == [[[1]], [[2, 3, 4, 5]]]


def test_who_waits_is_woken_when_it_is_cancelled_and_the_client_is_told() -> None:
    async def read() -> tuple[list[TokenOutput], bool]:
        stream = OutputStream(Client(), asyncio.get_running_loop())  # type: ignore[arg-type]
        waiting = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        assert not stream.is_cancelled()
        stream.cancel()
        return await waiting, stream.is_cancelled()

    assert asyncio.run(read()) == ([], True)


@pytest.mark.parametrize(
    ("has_engine", "error", "expected"),
    [
        (False, EngineUnavailable("it died"), EngineUnavailable),
        (True, QueueFull(1, 1, 0.0), RelayedError),
    ],
)
def test_a_failure_for_want_of_an_engine_is_told_from_others(
    has_engine: bool, error: RequestError, expected: type[RequestError]
) -> None:
    async def read() -> None:
        stream = OutputStream(Client(has_engine), asyncio.get_running_loop())  # type: ignore[arg-type]
        tell(stream, error_output("r", error))
        with pytest.raises(RequestError) as raised:
            await stream.next()
        assert (type(raised.value), raised.value.code, str(raised.value)) == (expected, error.code, str(error))

    asyncio.run(read())


def test_all_open_streams_can_be_waited_for() -> None:
    async def wait() -> list[int]:
        streams, stream = OpenStreams(), OutputStream(Client(), asyncio.get_running_loop())  # type: ignore[arg-type]
        with streams.opened("a", stream):
            left = [await streams.wait_closed(timeout_s=0.0)]
            closing = asyncio.create_task(streams.wait_closed(timeout_s=600.0))
            await asyncio.sleep(0)
            streams.cancel("nobody")
            assert not stream.is_cancelled()
        assert stream.is_cancelled()
        return [*left, await closing]

    assert asyncio.run(wait()) == [1, 0]
