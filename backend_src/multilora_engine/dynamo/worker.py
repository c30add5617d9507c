"""`DynamoWorker`: an engine process as Dynamo's runtime drives it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import ExitStack, aclosing
from functools import partial
from typing import Any

from dynamo._core import Context
from dynamo.common.backend import EngineConfig as Registration
from dynamo.common.backend import LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload, is_probe
from dynamo.common.backend.publisher import PushSource
from dynamo.llm import update_model_taints

from multilora_engine.config import LEAST_HOST_TIER_BYTES, on_device
from multilora_engine.dynamo.adapters import FleetAdapters
from multilora_engine.dynamo.answers import CANCELLED, END, Answer, Chunk, dynamo_error
from multilora_engine.dynamo.cards import AdapterCards
from multilora_engine.dynamo.catalogue import FleetCatalogue, SourceReader
from multilora_engine.dynamo.engine_calls import EngineCalls, EngineOperator
from multilora_engine.dynamo.fleet_aliases import FleetAliases, WorkerAliases
from multilora_engine.dynamo.fleet_calls import FleetCalls
from multilora_engine.dynamo.fleet_messages import Described, ToWorker, read_worker_request, worker_chunk
from multilora_engine.dynamo.fleet_uploads import FleetUploads
from multilora_engine.dynamo.options import WorkerOptions, parse_options
from multilora_engine.dynamo.reports import BlockPublisher, StatsReporter
from multilora_engine.dynamo.requests import engine_request, read_request
from multilora_engine.dynamo.residency_taints import ResidencyTaints
from multilora_engine.dynamo.streams import OpenStreams
from multilora_engine.dynamo.updates import EVENTS, UPDATES, SystemUpdates
from multilora_engine.dynamo.workers import Workers
from multilora_engine.engine_info import EngineInfo
from multilora_engine.errors import RequestError
from multilora_engine.lora.life_cycle import Residency
from multilora_engine.process.client import EngineClient
from multilora_engine.process.paths import owned_socket_path
from multilora_engine.process.supervisor import EngineProcess
from multilora_engine.serving.front import new_id
from multilora_engine.text.tokenizer import Tokenizer
from multilora_engine.tritonserver.installation import engine_environment

_FIRST_CONTACT_S = 30.0

logger = logging.getLogger(__name__)


class DynamoWorker(LLMEngine):
    """Owns the engine process, which is started again when it dies; requests in flight then go to another worker.

    All methods run in one event loop.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._resources = ExitStack()
        self._streams = OpenStreams()
        self._blocks = BlockPublisher()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_ready = asyncio.Event()
        self._taints: ResidencyTaints | None = None

    @classmethod
    async def from_args(cls, argv: Sequence[str] | None = None) -> tuple[DynamoWorker, WorkerConfig]:
        options, config = parse_options(argv)
        return cls(options), config

    async def start(self, worker_id: int) -> Registration:
        """Start the engine and wait until it has loaded. Raises ConfigError."""
        self._loop = asyncio.get_running_loop()
        info = await asyncio.to_thread(self._start_engine)
        logger.info("worker %x serves %s", worker_id, self._options.model_name)
        engine = on_device(self._options.engine, info.device)
        return Registration(
            model=str(engine.model_path),
            served_model_name=self._options.model_name,
            llm=LlmRegistration(
                context_length=info.max_model_len,
                kv_cache_block_size=engine.block_size,
                total_kv_blocks=info.kv_cache_tokens // engine.block_size,
                max_num_seqs=engine.max_num_seqs,
                max_num_batched_tokens=engine.max_num_batched_tokens,
                max_gpu_lora_count=engine.lora.max_loras,
            ),
        )

    async def kv_event_sources(self) -> list[Any]:
        return [PushSource(on_ready=self._blocks.start)] if self._options.engine.enable_prefix_caching else []

    async def on_endpoint_ready(self, endpoint: Any) -> None:
        """Publish the sources' adapters, while requests for the base model are served already."""
        engine, layout = on_device(self._options.engine, self._info.device), self._info.adapter_layout
        cards = AdapterCards(endpoint, str(engine.model_path), engine.block_size, engine.lora.max_loras)
        names = layout.sites.part_names
        workers = Workers(await endpoint.client(), Context, endpoint.connection_id())
        self._adapters = FleetAdapters(self._operator, cards, self._options.model_name, names)
        reader = SourceReader(engine, layout)
        self._resources.callback(reader.close)
        uploads = FleetUploads(
            self._operator,
            workers,
            reader,
            layout,
            int(engine.lora.lora_cache_host_memory_bytes) or LEAST_HOST_TIER_BYTES,
            engine.lora.lora_on_conflict == "replace",
        )
        catalogue = FleetCatalogue(uploads, self._adapters, workers, self._operator, reader, layout)
        self._calls = EngineCalls(self._client, self._loop, self._streams, uploads)
        self._aliases = aliases = WorkerAliases(FleetAliases(), uploads, workers, self._operator)
        description = Described(self._info, self._options.model_name, engine.block_size)
        self._fleet = FleetCalls(self._calls, self._operator, uploads, self._adapters, catalogue, aliases, description)
        self._updates = SystemUpdates(catalogue, self._operator, lambda: self._adapters.cards, endpoint.connection_id())
        self._taints = ResidencyTaints(partial(update_model_taints, endpoint))
        await catalogue.hear_first_news()
        await aliases.hear()
        self._is_ready.set()
        self._begin(self._scan_sources())
        self._begin(catalogue.follow_news())
        self._begin(aliases.follow())

    async def generate(self, request: Mapping[str, Any], context: Any) -> AsyncGenerator[Chunk, None]:
        """The answer to a prompt, piece by piece. Raises the exceptions of errors.py."""
        try:
            message = read_worker_request(request)
        except RequestError as error:
            raise dynamo_error(error) from None
        await self._is_ready.wait()
        answers = self._answer_prompt(request, context) if message is None else self._answer_fleet(message, context)
        async with aclosing(answers):
            async for chunk in answers:
                yield chunk

    async def _answer_prompt(self, request: Mapping[str, Any], context: Any) -> AsyncGenerator[Chunk, None]:
        try:
            read = read_request(request)
            self._adapters.check_meant(read.model, read.lora_name)
            asked = engine_request(read, new_id(), self._info, is_probe(request))
            asked = await self._aliases.resolve(asked, context.id())
            answer = Answer(asked, self._tokenizer)
            outputs = self._calls.generate(asked, context.id(), context.id(), context.trace_id or "")
            async with aclosing(outputs):
                async for output in outputs:
                    yield CANCELLED if output is None else answer.chunk(output)
        except RequestError as error:
            raise dynamo_error(error) from None

    async def _answer_fleet(self, message: ToWorker, context: Any) -> AsyncGenerator[Chunk, None]:
        async with aclosing(self._fleet.answer(message, context.id())) as answers:
            async for answer in answers:
                yield worker_chunk(answer)
        yield END

    async def abort(self, context: Any) -> None:
        self._streams.cancel(context.id())

    async def health_check_payload(self) -> Mapping[str, Any]:
        """A prompt of one token and an answer of one token: the whole way through the engine."""
        payload: Mapping[str, Any] = build_health_check_payload(bos_token_id=0)
        return payload

    def component_metrics_dp_ranks(self) -> list[int]:
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        self._loop.call_soon_threadsafe(lambda: self._begin(self._reporter.run(publisher)))

    async def register_prometheus(self, metrics: Any) -> None:
        metrics.register_prometheus_expfmt_callback(lambda: self._reporter.page)

    def supported_updates(self) -> set[str]:
        return set(UPDATES)

    async def engine_update(self, update: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return await self._updates.answer(update, body)

    def supported_controls(self) -> set[str]:
        return {EVENTS}

    async def engine_control(self, control: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return await self._updates.answer(control, body)

    async def cleanup(self) -> None:
        """Give requests in flight the time to finish, then end the engine: Dynamo has stopped sending requests."""
        for task in self._tasks:
            task.cancel()
        if lost := await self._streams.wait_closed(self._options.drain_timeout_s):
            logger.warning("%d requests have not finished in time", lost)
        await asyncio.to_thread(self._resources.close)

    def _start_engine(self) -> EngineInfo:
        with ExitStack() as resources:
            path = resources.enter_context(owned_socket_path(os.getpid()))
            options = self._options
            hang_timeout_s = options.engine.engine_hang_timeout_s
            engine = EngineProcess(options.parameters, path, engine_environment({}), hang_timeout_s=hang_timeout_s)
            resources.callback(engine.close)
            engine.start()
            self._client = EngineClient(path, self._blocks)
            resources.callback(self._client.close)
            self._operator = EngineOperator(self._client, self._loop)
            self._reporter = StatsReporter(
                self._operator, options.model_name, lambda: engine.generation - 1, self._tell_residency
            )
            self._info = self._client.wait_until_ready(_FIRST_CONTACT_S)
            self._tokenizer = Tokenizer(options.engine.tokenizer_path or options.engine.model_path)
            self._resources = resources.pop_all()
            return self._info

    async def _tell_residency(self, residency: Residency) -> None:
        if self._taints is not None:
            await self._taints.report(residency)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task beside the requests, until it ends or the worker does."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _scan_sources(self) -> None:
        """Scan again and again: an adapter that is put into a source is a model of the fleet soon after."""
        while True:
            try:
                await self._adapters.scan_sources()
            except Exception as error:
                # The engine's errors, and those of Dynamo's discovery, which have no types.
                logger.error("the adapters of the sources have no cards: %s", error)
            await asyncio.sleep(self._options.sources_interval_s)
