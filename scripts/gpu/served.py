"""A model that is served for the steps of `scripts/gpu_serve`: by tritonserver, or where it is missing by the engine's
own process alone; and its clients, which ask both alike.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from benchmarks.light_client import light_asks
from checkpoints.random_llama import token_of
from checkpoints.telling_adapters import packed_adapter
from multilora_client import DIRECT, AsyncClient
from multilora_client.bench.load import Ask, Sample
from multilora_client.bench.workload import Job
from multilora_client.errors import MultiloraClientError
from multilora_client.options import GenerateOptions
from multilora_engine.lora.layout import PackedAdapter
from multilora_engine.process.client import EngineClient
from multilora_engine.process.operations import ReadStats, UnloadAdapter
from multilora_engine.process.paths import ENGINE_MODULE, socket_path, temporary_folder
from multilora_engine.process.supervisor import EngineProcess
from multilora_engine.request import GenerationRequest, SamplingParams, TokenOutput
from multilora_engine.tritonserver.installation import engine_environment
from multilora_engine.tritonserver.server_process import TOKEN_VARIABLE, marked_processes, runs_module
from multilora_wire.layout import AdapterLayout
from servers.started_server import started_server
from trials.judging_clients import task_id, telling_adapter

ANSWER_TIMEOUT_S = 60.0
_CONNECT_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Served:
    """A model that is served. socket: of the engine. grpc_url: `host:port`, empty without tritonserver.

    token: marks the processes of the server.
    """

    socket: Path
    grpc_url: str
    token: str

    @property
    def by(self) -> str:
        return "tritonserver" if self.grpc_url else "the engine's own process"

    @property
    def engine_pid(self) -> int | None:
        """The engine that runs now, if one does."""
        return next((pid for pid in marked_processes(self.token) if runs_module(pid, ENGINE_MODULE)), None)


@contextmanager
def served(model: Path, parameters: Mapping[str, str], has_tritonserver: bool) -> Iterator[Served]:
    """A server that is ready. parameters: of the engine. Raises ServerFailed or ConfigError."""
    if has_tritonserver:
        with started_server(model, overrides=parameters) as server:
            yield Served(socket_path(server.pid), server.grpc_url, server.token)
        return
    with engine_process(model, parameters, {}) as engine:
        yield engine


@contextmanager
def engine_process(model: Path, parameters: Mapping[str, str], variables: Mapping[str, str]) -> Iterator[Served]:
    """The engine's own process, ready, as tritonserver's model would start it. variables: of its environment.

    Raises ConfigError.
    """
    with tempfile.TemporaryDirectory(prefix="engine-", dir=temporary_folder()) as folder:
        token, socket = Path(folder).name, Path(folder) / "engine.sock"
        environment = engine_environment({**variables, TOKEN_VARIABLE: token})
        engine = EngineProcess({"model_path": str(model), **parameters}, socket, environment, hang_timeout_s=30.0)
        try:
            engine.start()
            yield Served(socket, "", token)
        finally:
            engine.close()


class Client(Protocol):
    """A client of a telling model. Its methods raise MultiloraClientError."""

    def ask(
        self, prompt: Sequence[int], max_tokens: int, number: int | None, streams: bool
    ) -> AsyncGenerator[str, None]:
        """The text of an answer, in one piece or as it comes. number: of the adapter; None: the base model."""
        ...

    async def upload(self, number: int, version: int) -> None: ...

    async def unload(self, number: int) -> None: ...


@asynccontextmanager
async def client_of(server: Served, layout: AdapterLayout) -> AsyncIterator[Client]:
    """layout: of the telling model's adapters."""
    if server.grpc_url:
        async with AsyncClient(f"grpc://{server.grpc_url}") as client:
            yield _OverGrpc(client, layout)
    else:
        with engine_calls(server) as calls:
            yield _OverSocket(calls, layout)


class _OverGrpc:
    def __init__(self, client: AsyncClient, layout: AdapterLayout) -> None:
        self._client, self._layout = client, layout

    async def ask(
        self, prompt: Sequence[int], max_tokens: int, number: int | None, streams: bool
    ) -> AsyncGenerator[str, None]:
        adapter = None if number is None else task_id(number)
        options: GenerateOptions = {"input_ids": list(prompt), "max_tokens": max_tokens, "timeout_s": ANSWER_TIMEOUT_S}
        if not streams:
            yield (await self._client.generate(adapter=adapter, **options)).text
            return
        async with aclosing(self._client.stream(adapter=adapter, **options)) as chunks:
            async for chunk in chunks:
                yield chunk.text

    async def upload(self, number: int, version: int) -> None:
        await self._client.upload(telling_adapter(number, self._layout, version), timeout_s=ANSWER_TIMEOUT_S)

    async def unload(self, number: int) -> None:
        await self._client.unload_adapter(task_id(number))


class _OverSocket:
    def __init__(self, calls: EngineCalls, layout: AdapterLayout) -> None:
        self._calls, self._layout = calls, layout

    async def ask(
        self, prompt: Sequence[int], max_tokens: int, number: int | None, streams: bool
    ) -> AsyncGenerator[str, None]:
        adapter = None if number is None else task_id(number)
        async with aclosing(self._calls.generate(prompt, max_tokens, adapter)) as outputs:
            async for output in outputs:
                yield output.text

    async def upload(self, number: int, version: int) -> None:
        await self._calls.put(task_id(number), packed_adapter(number, version, self._layout))

    async def unload(self, number: int) -> None:
        await self._calls.unload(task_id(number))


class _Heard:
    """The listener of a call, whose outputs another thread awaits."""

    unsent_bytes = 0

    def __init__(self) -> None:
        self.outputs: asyncio.Queue[TokenOutput] = asyncio.Queue()
        self.is_left = False
        self._loop = asyncio.get_running_loop()

    def on_output(self, output: TokenOutput) -> None:
        self._loop.call_soon_threadsafe(self.outputs.put_nowait, output)

    def flush(self) -> None:
        pass

    def is_cancelled(self) -> bool:
        return self.is_left


class EngineCalls:
    """Calls of an engine by its socket, as tritonserver's models make them. Raises MultiloraClientError."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    async def put(self, lora_task_id: int, adapter: PackedAdapter) -> None:
        await self._all(lambda heard, name: self._client.put_adapter(heard, name, lora_task_id, adapter))

    async def unload(self, lora_task_id: int) -> None:
        operation = UnloadAdapter(lora_task_id=lora_task_id)
        await self._all(lambda heard, name: self._client.operate(heard, name, operation))

    def generate(
        self, prompt: Sequence[int], max_tokens: int, lora_task_id: int | None
    ) -> AsyncGenerator[TokenOutput, None]:
        """Greedy, of exactly so many tokens."""
        sampling = SamplingParams(max_tokens=max_tokens, end_id=-1)

        def submit(heard: _Heard, name: str) -> None:
            request = GenerationRequest(name, list(prompt), sampling, lora_task_id, ANSWER_TIMEOUT_S)
            self._client.generate(heard, [request])

        return self._outputs(submit)

    async def tiers(self) -> dict[str, dict[str, float]]:
        """The counts of the adapters' tiers, as of `LoRAStats`."""
        text = await self._all(lambda heard, name: self._client.operate(heard, name, ReadStats()))
        tiers: dict[str, dict[str, float]] = json.loads(text)["tiers"]
        return tiers

    async def _all(self, submit: Callable[[_Heard, str], None]) -> str:
        return "".join([output.text async for output in self._outputs(submit)])

    async def _outputs(self, submit: Callable[[_Heard, str], None]) -> AsyncGenerator[TokenOutput, None]:
        heard = _Heard()
        submit(heard, uuid.uuid4().hex)
        try:
            is_over = False
            while not is_over:
                output = await heard.outputs.get()
                if output.error_code is not None:
                    raise MultiloraClientError(output.error_message or "", code=output.error_code)
                is_over = output.is_final
                yield output
        finally:
            heard.is_left = True


@contextmanager
def engine_calls(server: Served) -> Iterator[EngineCalls]:
    client = EngineClient(server.socket)
    try:
        client.wait_until_ready(_CONNECT_TIMEOUT_S)
        yield EngineCalls(client)
    finally:
        client.close()


@asynccontextmanager
async def ask_of(server: Served, calls: EngineCalls, output_tokens: int) -> AsyncIterator[Ask]:
    """Greedy streams of exactly so many tokens, by a client that takes little of the machine.

    A prompt's characters are its tokens, as of `random_llama`.
    """
    if server.grpc_url:
        async with light_asks(server.grpc_url, [DIRECT], output_tokens) as (ask,):
            yield ask
    else:
        yield partial(_ask_engine, calls, output_tokens)


async def _ask_engine(calls: EngineCalls, output_tokens: int, job: Job, due_s: float) -> Sample:
    clock = asyncio.get_running_loop().time
    sent_s, times, error, outputs = clock(), list[float](), "", list[TokenOutput]()
    adapter = job.target.lora_task_id
    try:
        async for output in calls.generate([token_of(each) for each in job.prompt], output_tokens, adapter):
            times.append(clock())
            outputs.append(output)
    except MultiloraClientError as failure:
        error = failure.code
    return Sample(
        job=job,
        due_s=due_s,
        sent_s=sent_s,
        piece_times_s=tuple(times),
        done_s=clock(),
        text="".join(output.text for output in outputs),
        num_input_tokens=len(job.prompt),
        num_output_tokens=outputs[-1].num_output_tokens if outputs else 0,
        error=error,
    )
