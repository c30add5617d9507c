"""Outputs on their way from the thread of the engine's client to an event loop."""

from __future__ import annotations

import asyncio
import threading

from multilora_engine.dynamo.streams import OutputStream
from multilora_engine.errors import EngineUnavailable, QueueFull
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


def test_a_failure_for_want_of_an_engine_is_told_from_others() -> None:
    async def fails_without_engine(has_engine: bool) -> bool:
        stream = OutputStream(Client(has_engine), asyncio.get_running_loop())  # type: ignore[arg-type]
        error = QueueFull(1, 1, 0.0) if has_engine else EngineUnavailable("it died")
        tell(stream, error_output("r", error))
        await stream.next()
        return stream.engine_is_gone

    assert asyncio.run(fails_without_engine(has_engine=False))
    assert not asyncio.run(fails_without_engine(has_engine=True))
