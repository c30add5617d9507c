"""The blocking and the asyncio client: thin shells around messages.py (requests, answers) and calls.py (adapters)."""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import aclosing, closing
from types import TracebackType
from typing import Any, Self, Unpack
from urllib.parse import urlsplit

from multilora_client.adapter import Adapter, check_origin
from multilora_client.calls import SITES_UNTOLD, AdapterLedger, Call
from multilora_client.doors import DIRECT, Door
from multilora_client.errors import AdapterNotFound, InvalidRequest
from multilora_client.generation import Chunk, Generation
from multilora_client.generation_inputs import digest_input, generation_inputs, name_input, stop_inputs
from multilora_client.grpc_transport import AsyncGrpcTransport, GrpcTransport
from multilora_client.http_transport import AsyncHttpTransport, HttpTransport
from multilora_client.keyed_transport import AsyncKeyedTransport, KeyedTransport, chosen_key
from multilora_client.messages import InferRequest
from multilora_client.operations import (
    AdapterEvents,
    ModelInfo,
    WeightAction,
    alias_fields,
    combine_fields,
    load_fields,
    operation_request,
    parse_adapter,
    parse_adapters,
    parse_alias,
    parse_aliases,
    parse_events,
    parse_layout,
    parse_model,
    parse_report,
    parse_request_names,
    parse_sites,
    request_names_fields,
    which_adapter,
)
from multilora_client.options import ChatOptions, GenerateOptions
from multilora_client.tls import Tls
from multilora_client.tokens import detokenize_request, parse_text, parse_token_ids, tokenize_request
from multilora_client.transport import AsyncTransport, Transport
from multilora_wire.adapter_info import AdapterInfo, Alias
from multilora_wire.layout import AdapterLayout

DEFAULT_URL = "grpc://localhost:8001"
_HOST_AND_PORT = re.compile(r"[^/@?#]+:\d+")


class _Calls:
    """Makes the calls of one client, which share one ledger of the server's adapters."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._ledger = AdapterLedger()

    def generate(
        self, prompt: str | None, adapter: Adapter | int | None, *, streaming: bool, **options: Unpack[GenerateOptions]
    ) -> Call:
        request = InferRequest(
            self._door.stream_model if streaming else self._door.unary_model,
            options.get("request_id") or uuid.uuid4().hex,
            generation_inputs(prompt, streaming, self._door, **options),
            options.get("timeout_s"),
            options.get("traceparent") or "",
            on_behalf_of=options.get("on_behalf_of") or "",
        )
        return Call(request, adapter, self._ledger, options.get("num_return_sequences") or 1)

    def upload(
        self, adapter: Adapter, lora_name: str | None, timeout_s: float | None, expected_digest: str | None = None
    ) -> Call:
        self._ledger.forget(adapter)
        inputs = {} if lora_name is None else name_input(lora_name)
        inputs |= {} if expected_digest is None else digest_input(expected_digest)
        return Call(InferRequest(self._door.upload_model, uuid.uuid4().hex, inputs, timeout_s), adapter, self._ledger)

    def stop(self, request_id: str) -> InferRequest:
        return InferRequest(self._door.stop_model, request_id, stop_inputs())


class Client:
    """Blocking client of one server. Any number of threads may use it at once.

    url: `grpc://host:8001` or `http://host:8000` (`grpcs`, `https` with TLS); the scheme picks the protocol, and
        `host:8001` alone is gRPC.
    tls: the authorities to trust with `grpcs` and `https`, None for this machine's.
    api_key: the key for a server that has API keys; None for the environment's MULTILORA_API_KEY.
    door: the models that answer (DIRECT, ENSEMBLE or your own Door).
    transport: replaces the network, see MockTransport.

    >>> with Client() as client:
    ...     pirate = load_adapter("adapters/pirate")
    ...     print(client.generate("Who are you?", adapter=pirate, max_tokens=40).text)
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        door: Door = DIRECT,
        tls: Tls | None = None,
        api_key: str | None = None,
        transport: Transport | None = None,
    ) -> None:
        self._door, self._shared = door, transport or _make_transport(url, tls)
        key = chosen_key(api_key)
        self._transport = KeyedTransport(self._shared, key) if key else self._shared
        self._calls = _Calls(door)

    def with_api_key(self, api_key: str) -> Client:
        """A client with another API key over the same connection, which stays this one's to close."""
        return Client(door=self._door, api_key=api_key, transport=self._shared)

    def generate(
        self, prompt: str | None = None, *, adapter: Adapter | int | None = None, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """Generate a whole answer.

        adapter: an Adapter, whose weights are sent when the server needs them; the id of one that the server has; or
            None for the base model.
        Raises AdapterNotFound, AdapterConflict, CacheFull, InvalidRequest and the rest of errors.py; AdapterError for
            an adapter that was made for another model than the server's.
        """
        return self._infer(self._calls.generate(prompt, adapter, streaming=False, **options))

    def stream(
        self, prompt: str | None = None, *, adapter: Adapter | int | None = None, **options: Unpack[GenerateOptions]
    ) -> Generator[Chunk, None, None]:
        """Generate an answer piece by piece. Closing the iterator early cancels the request on the server."""
        call = self._calls.generate(prompt, adapter, streaming=True, **options)
        try:
            yield from self._stream(call, options.get("lora_name"))
        except AdapterNotFound as error:
            call.resend_weights(error)
            yield from self._stream(call, options.get("lora_name"))

    def upload(
        self,
        adapter: Adapter,
        *,
        lora_name: str | None = None,
        timeout_s: float | None = None,
        expected_digest: str | None = None,
    ) -> Generation:
        """Send an adapter without a prompt, for requests by its id to find. The answer tells its `lora_digest`.

        lora_name: a name to find it by, too; its task id must be the name's (multilora_wire's `task_id_of_name`).
        expected_digest: of the version that it replaces. Where the server has another version, or none, nothing is
            changed, and AdapterConflict is raised. None: `lora_on_conflict` alone decides.
        Raises TimedOut after `timeout_s`; the server may have the adapter all the same.
        """
        return self._infer(self._calls.upload(adapter, lora_name, timeout_s, expected_digest))

    def stop(self, request_id: str) -> None:
        """End the request with this id. An unknown id is not an error: the request may just have ended by itself."""
        for _ in self._transport.stream(self._calls.stop(request_id)):
            pass

    def tokenize(
        self, prompt: str | None = None, *, add_special_tokens: bool | None = None, **chat: Unpack[ChatOptions]
    ) -> list[int]:
        """Token ids of a prompt, or of a chat by the model's template, as the server would compute them.

        add_special_tokens: see GenerateOptions.
        """
        return parse_token_ids(self._transport.infer(tokenize_request(prompt, add_special_tokens, **chat)))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, without special ones, as the server would write it."""
        return parse_text(self._transport.infer(detokenize_request(token_ids)))

    def describe_model(self) -> ModelInfo:
        """The model that the server serves."""
        return parse_model(self._transport.infer(operation_request("describe")))

    def list_adapters(self) -> list[AdapterInfo]:
        """Every adapter of the server, by task id."""
        return parse_adapters(self._transport.infer(operation_request("list")))

    def load_adapter(
        self, adapter: int | str, source: str = "", path: str = "", expected_digest: str | None = None
    ) -> AdapterInfo:
        """Have the server fetch an adapter (a task id or a name) from its sources, or from the one named; or from disk.

        path: a directory of the server that one of its sources covers; it is then served under `adapter`.
        expected_digest: see unload_adapter.
        Returns when the adapter is in host memory. Raises NotFound, AdapterConflict, InvalidRequest if the source's
        adapter is unusable.
        """
        fields = load_fields(adapter, source, path, expected_digest)
        return parse_adapter(self._transport.infer(operation_request("load", fields)))

    def combine_adapters(
        self, adapter: int | str, members: Mapping[int | str, float], expected_digest: str | None = None
    ) -> AdapterInfo:
        """Have the server make a set, under a task id or a name: the sum of its members' updates times their weights.

        members: weights by task id or name. The set keeps the members' present versions. expected_digest: of the set's
        own name, see unload_adapter. Returns when it is in host
        memory. Raises NotFound for an unknown member, AdapterConflict, InvalidRequest, Unsupported.
        """
        fields = combine_fields(adapter, members, expected_digest)
        return parse_adapter(self._transport.infer(operation_request("combine", fields)))

    def unload_adapter(self, adapter: int | str, tenant: str = "", expected_digest: str | None = None) -> AdapterInfo:
        """Make the server forget an adapter (a task id or a name). The answer is its record from before.

        tenant: whose it is; those who run the server name one, tenants need not. expected_digest: of the version that
            is meant; nothing is changed where the task id or the name means another one, and AdapterConflict is raised.
        Requests that use the adapter keep it until they have finished. Raises NotFound.
        """
        fields = which_adapter(adapter, tenant, expected_digest)
        return parse_adapter(self._transport.infer(operation_request("unload", fields)))

    def pin_adapter(self, adapter: int | str, tenant: str = "", expected_digest: str | None = None) -> AdapterInfo:
        """Keep an adapter in host memory; which one: see unload_adapter. Raises NotFound, AdapterConflict."""
        fields = which_adapter(adapter, tenant, expected_digest)
        return parse_adapter(self._transport.infer(operation_request("pin", fields)))

    def unpin_adapter(self, adapter: int | str, tenant: str = "", expected_digest: str | None = None) -> AdapterInfo:
        """Let a pinned adapter be evicted again; which one: see unload_adapter. Raises NotFound, AdapterConflict."""
        fields = which_adapter(adapter, tenant, expected_digest)
        return parse_adapter(self._transport.infer(operation_request("unpin", fields)))

    def list_all(self) -> tuple[list[AdapterInfo], list[Alias]]:
        """Every adapter of the server, by task id, and every alias, by owner and name."""
        response = self._transport.infer(operation_request("list"))
        return parse_adapters(response), parse_aliases(response)

    def list_names(self, names: Sequence[str] = ()) -> list[str]:
        """The names by which this client's requests can ask for adapters and aliases of the server, in a tier or not.

        names: instead of all, those of these.
        """
        return parse_request_names(self._transport.infer(operation_request("list", request_names_fields(names))))

    def list_aliases(self) -> list[Alias]:
        """Every alias of the server, by owner and name."""
        return parse_aliases(self._transport.infer(operation_request("list")))

    def set_alias(self, name: str, members: Mapping[str, int], tenant: str = "") -> Alias:
        """Have requests by a name answered by adapters of the server, each as often as its weight is of all weights.

        members: weights by name, whole numbers >= 0. Requests of one session keep their member. tenant: the owner, see
        unload_adapter. Raises AdapterConflict when an adapter has the name, InvalidRequest.
        """
        fields = alias_fields(name, members, tenant)
        return parse_alias(self._transport.infer(operation_request("alias", fields)))

    def remove_alias(self, name: str, tenant: str = "") -> Alias:
        """Make the server forget an alias. The answer is its record from before. Raises NotFound."""
        return parse_alias(self._transport.infer(operation_request("unalias", which_adapter(name, tenant))))

    def adapter_events(self, since: int = 0) -> AdapterEvents:
        """The events of adapters after number `since`, as far as the server remembers them."""
        return parse_events(self._transport.infer(operation_request("events", {"since": since})))

    def adapter_stats(self) -> dict[str, Any]:
        """Sizes and counts: `tiers`, `usage` by task id of the adapters most asked for, `other_usage`."""
        return parse_report(self._transport.infer(operation_request("stats")))

    def switch_weights(self, action: WeightAction, modules: Sequence[str] = ("*",)) -> dict[str, Any]:
        """List, unpack or pack quantised weights, by names or globs: `weights` that are meant, `stats` of all."""
        fields = {"action": action, "modules": list(modules)}
        return parse_report(self._transport.infer(operation_request("weights", fields)))

    def adapter_layout(self) -> AdapterLayout:
        """The layout of the server's adapters, from which their sizes follow."""
        return parse_layout(self._transport.infer(operation_request("layout")))

    def close(self) -> None:
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _infer(self, call: Call) -> Generation:
        try:
            return self._attempt(call)
        except AdapterNotFound as error:
            call.resend_weights(error)
            return self._attempt(call)

    def _attempt(self, call: Call) -> Generation:
        self._check_origin(call)
        return call.generation(self._transport.infer(call.request))

    def _check_origin(self, call: Call) -> None:
        """Ask for the server's sites anew each time that weights are sent: another model may be served by now."""
        if (origin := call.origin) is None:
            return
        try:
            sites = parse_sites(self._transport.infer(call.sites_request))
        except SITES_UNTOLD:
            return
        if sites is not None and not origin.fits(sites):
            check_origin(origin, sites, self.describe_model().model)

    def _stream(self, call: Call, lora_name: str | None) -> Generator[Chunk, None, None]:
        if call.adapter and call.sends_weights and not self._transport.streams_tensors:
            call.check_upload_apart()
            self.upload(call.adapter, lora_name=lora_name, timeout_s=call.request.timeout_s)
            call.weights_are_uploaded()
        self._check_origin(call)
        with closing(self._transport.stream(call.request)) as responses:
            for response in responses:
                yield call.chunk(response)
        call.check_ended()


class AsyncClient:
    """asyncio client of one server; the arguments and methods of Client.

    >>> async with AsyncClient() as client, aclosing(client.stream("Tell me more")) as chunks:
    ...     async for chunk in chunks:
    ...         print(chunk.text, end="")
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        door: Door = DIRECT,
        tls: Tls | None = None,
        api_key: str | None = None,
        transport: AsyncTransport | None = None,
    ) -> None:
        self._door, self._shared = door, transport or _make_async_transport(url, tls)
        key = chosen_key(api_key)
        self._transport = AsyncKeyedTransport(self._shared, key) if key else self._shared
        self._calls = _Calls(door)

    def with_api_key(self, api_key: str) -> AsyncClient:
        """A client with another API key over the same connection, which stays this one's to close."""
        return AsyncClient(door=self._door, api_key=api_key, transport=self._shared)

    async def generate(
        self, prompt: str | None = None, *, adapter: Adapter | int | None = None, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """Generate a whole answer; see Client.generate."""
        return await self._infer(self._calls.generate(prompt, adapter, streaming=False, **options))

    async def stream(
        self, prompt: str | None = None, *, adapter: Adapter | int | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Chunk, None]:
        """Generate an answer piece by piece. Leave it early under `contextlib.aclosing`, which cancels at once."""
        call = self._calls.generate(prompt, adapter, streaming=True, **options)
        try:
            async with aclosing(self._stream(call, options.get("lora_name"))) as chunks:
                async for chunk in chunks:
                    yield chunk
        except AdapterNotFound as error:
            call.resend_weights(error)
            async with aclosing(self._stream(call, options.get("lora_name"))) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def upload(
        self,
        adapter: Adapter,
        *,
        lora_name: str | None = None,
        timeout_s: float | None = None,
        expected_digest: str | None = None,
    ) -> Generation:
        """Send an adapter without a prompt; see Client.upload."""
        return await self._infer(self._calls.upload(adapter, lora_name, timeout_s, expected_digest))

    async def stop(self, request_id: str) -> None:
        """End the request with this id; see Client.stop."""
        async for _ in self._transport.stream(self._calls.stop(request_id)):
            pass

    async def tokenize(
        self, prompt: str | None = None, *, add_special_tokens: bool | None = None, **chat: Unpack[ChatOptions]
    ) -> list[int]:
        """Token ids of a text or a chat; see Client.tokenize."""
        return parse_token_ids(await self._transport.infer(tokenize_request(prompt, add_special_tokens, **chat)))

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of tokens; see Client.detokenize."""
        return parse_text(await self._transport.infer(detokenize_request(token_ids)))

    async def describe_model(self) -> ModelInfo:
        """The model that the server serves."""
        return parse_model(await self._transport.infer(operation_request("describe")))

    async def list_adapters(self) -> list[AdapterInfo]:
        """Every adapter of the server, by task id."""
        return parse_adapters(await self._transport.infer(operation_request("list")))

    async def load_adapter(
        self, adapter: int | str, source: str = "", path: str = "", expected_digest: str | None = None
    ) -> AdapterInfo:
        """Have the server fetch an adapter from its sources; see Client.load_adapter."""
        fields = load_fields(adapter, source, path, expected_digest)
        return parse_adapter(await self._transport.infer(operation_request("load", fields)))

    async def combine_adapters(
        self, adapter: int | str, members: Mapping[int | str, float], expected_digest: str | None = None
    ) -> AdapterInfo:
        """Have the server make a set; see Client.combine_adapters."""
        fields = combine_fields(adapter, members, expected_digest)
        return parse_adapter(await self._transport.infer(operation_request("combine", fields)))

    async def unload_adapter(
        self, adapter: int | str, tenant: str = "", expected_digest: str | None = None
    ) -> AdapterInfo:
        """Make the server forget an adapter; see Client.unload_adapter."""
        fields = which_adapter(adapter, tenant, expected_digest)
        return parse_adapter(await self._transport.infer(operation_request("unload", fields)))

    async def pin_adapter(
        self, adapter: int | str, tenant: str = "", expected_digest: str | None = None
    ) -> AdapterInfo:
        """Keep an adapter in host memory; which one: see unload_adapter. Raises NotFound, AdapterConflict."""
        fields = which_adapter(adapter, tenant, expected_digest)
        return parse_adapter(await self._transport.infer(operation_request("pin", fields)))

    async def unpin_adapter(
        self, adapter: int | str, tenant: str = "", expected_digest: str | None = None
    ) -> AdapterInfo:
        """Let a pinned adapter be evicted again; which one: see unload_adapter. Raises NotFound, AdapterConflict."""
        fields = which_adapter(adapter, tenant, expected_digest)
        return parse_adapter(await self._transport.infer(operation_request("unpin", fields)))

    async def list_all(self) -> tuple[list[AdapterInfo], list[Alias]]:
        """Every adapter of the server, by task id, and every alias, by owner and name."""
        response = await self._transport.infer(operation_request("list"))
        return parse_adapters(response), parse_aliases(response)

    async def list_names(self, names: Sequence[str] = ()) -> list[str]:
        """The names by which requests can ask for adapters and aliases; see Client.list_names."""
        response = await self._transport.infer(operation_request("list", request_names_fields(names)))
        return parse_request_names(response)

    async def list_aliases(self) -> list[Alias]:
        """Every alias of the server, by owner and name."""
        return parse_aliases(await self._transport.infer(operation_request("list")))

    async def set_alias(self, name: str, members: Mapping[str, int], tenant: str = "") -> Alias:
        """Have requests by a name answered by adapters, by weight; see Client.set_alias."""
        fields = alias_fields(name, members, tenant)
        return parse_alias(await self._transport.infer(operation_request("alias", fields)))

    async def remove_alias(self, name: str, tenant: str = "") -> Alias:
        """Make the server forget an alias. The answer is its record from before. Raises NotFound."""
        return parse_alias(await self._transport.infer(operation_request("unalias", which_adapter(name, tenant))))

    async def adapter_events(self, since: int = 0) -> AdapterEvents:
        """The events of adapters after number `since`, as far as the server remembers them."""
        return parse_events(await self._transport.infer(operation_request("events", {"since": since})))

    async def adapter_stats(self) -> dict[str, Any]:
        """Sizes and counts: `tiers`, `usage` by task id of the adapters most asked for, `other_usage`."""
        return parse_report(await self._transport.infer(operation_request("stats")))

    async def switch_weights(self, action: WeightAction, modules: Sequence[str] = ("*",)) -> dict[str, Any]:
        """List, unpack or pack quantised weights, by names or globs: `weights` that are meant, `stats` of all."""
        fields = {"action": action, "modules": list(modules)}
        return parse_report(await self._transport.infer(operation_request("weights", fields)))

    async def adapter_layout(self) -> AdapterLayout:
        """The layout of the server's adapters, from which their sizes follow."""
        return parse_layout(await self._transport.infer(operation_request("layout")))

    async def close(self) -> None:
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def _infer(self, call: Call) -> Generation:
        try:
            return await self._attempt(call)
        except AdapterNotFound as error:
            call.resend_weights(error)
            return await self._attempt(call)

    async def _attempt(self, call: Call) -> Generation:
        await self._check_origin(call)
        return call.generation(await self._transport.infer(call.request))

    async def _check_origin(self, call: Call) -> None:
        """Ask for the server's sites anew each time that weights are sent: another model may be served by now."""
        if (origin := call.origin) is None:
            return
        try:
            sites = parse_sites(await self._transport.infer(call.sites_request))
        except SITES_UNTOLD:
            return
        if sites is not None and not origin.fits(sites):
            check_origin(origin, sites, (await self.describe_model()).model)

    async def _stream(self, call: Call, lora_name: str | None) -> AsyncGenerator[Chunk, None]:
        if call.adapter and call.sends_weights and not self._transport.streams_tensors:
            call.check_upload_apart()
            await self.upload(call.adapter, lora_name=lora_name, timeout_s=call.request.timeout_s)
            call.weights_are_uploaded()
        await self._check_origin(call)
        async with aclosing(self._transport.stream(call.request)) as responses:
            async for response in responses:
                yield call.chunk(response)
        call.check_ended()


def _make_transport(url: str, tls: Tls | None) -> Transport:
    protocol, address, tls = parse_url(url, tls)
    return GrpcTransport(address, tls=tls) if protocol == "grpc" else HttpTransport(url, tls=tls)


def _make_async_transport(url: str, tls: Tls | None) -> AsyncTransport:
    protocol, address, tls = parse_url(url, tls)
    return AsyncGrpcTransport(address, tls=tls) if protocol == "grpc" else AsyncHttpTransport(url, tls=tls)


def parse_url(url: str, tls: Tls | None) -> tuple[str, str, Tls | None]:
    """`grpcs://host:1` -> ("grpc", "host:1", Tls()); a URL without a scheme is gRPC, and takes a port.

    Raises InvalidRequest, also for `tls` with a scheme that has no TLS.
    """
    is_complete = "://" in url or _HOST_AND_PORT.fullmatch(url) is not None
    try:
        parts = urlsplit(url if "://" in url else f"grpc://{url}")
        is_address = bool(parts.hostname) and parts.port != 0
    except ValueError:  # half of an IPv6 address, a port beyond 65535
        is_address = False
    if not is_complete or not is_address or parts.scheme not in ("grpc", "grpcs", "http", "https"):
        raise InvalidRequest(f"url is {url!r}; write grpc://host:8001, host:8001 or http://host:8000")
    is_encrypted = parts.scheme.endswith("s")
    if tls and not is_encrypted:
        raise InvalidRequest(f"url is {url!r}, which is plain text; with TLS write {parts.scheme}s://{parts.netloc}")
    return parts.scheme.removesuffix("s"), parts.netloc, (tls or Tls()) if is_encrypted else None
