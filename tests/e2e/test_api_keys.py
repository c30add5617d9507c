"""A real server with API keys: every door, both protocols, and the OpenAI front, for two tenants and their operator."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from random import Random
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
import tritonclient.grpc
import tritonclient.http
from support.api_keys import write_keys
from support.conformance import IDS
from support.openai_front import openai_front
from support.stock_clients import flag, inputs_of, stop_request, text_request, token_request
from tritonclient.utils import InferenceServerException

from multilora_client import Adapter, AdapterConflict, AdapterNotFound, Client, load_adapter
from multilora_client.errors import MultiloraClientError, PermissionDenied, RateExceeded, Unauthenticated
from multilora_client.keys import KeyRing
from multilora_client.openai.catalogue import Catalogue
from multilora_engine.tritonserver import ServerOptions, ServerProcess
from multilora_engine.tritonserver.upstream_models import UpstreamModels

REPOSITORY = Path(__file__).parents[2]
ACME, BOLT, OPERATOR, SLOW = (f"the secret key of {who}" for who in ("acme", "bolt", "the operator", "a slow one"))
ENTRIES: list[dict[str, Any]] = [
    {"key": ACME, "tenant": "acme", "adapters": ["pirate"], "base_model": True, "upload": True, "operate": True},
    {"key": BOLT, "tenant": "bolt", "base_model": True, "upload": True},
    {"key": OPERATOR, "adapters": ["*"], "base_model": True, "upload": True, "operate": True},
    {"key": SLOW, "tenant": "slow", "base_model": True, "requests_per_minute": 1},
]
WALKED = [17, 18]
"""Task ids that no other test has."""
TEXT = {"text_input": "The sea is", "max_tokens": 4}
QUESTION = [{"role": "user", "content": "Who are you?"}]
LONG_PROMPT = "A ship sailed over the sea, and on the ship there was a captain who told long stories. " * 4


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_keys(tmp_path_factory.mktemp("keys") / "keys.json", *ENTRIES)


@pytest.fixture(scope="module")
def keyed(
    default_model_dir: Path, keys_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    options = ServerOptions(
        model=default_model_dir,
        model_repository=REPOSITORY / "model_repository",
        upstream_models=UpstreamModels.DECOUPLED,
        overrides={
            "api_keys_file": str(keys_file),
            "kv_cache_memory_bytes": "128MiB",
            "max_num_seqs": "8",
            "lora_cache_host_memory_bytes": "128MiB",
            "lora_cache_dir": str(tmp_path_factory.mktemp("adapters")),
            "lora_sources": json.dumps([{"source": "directory", "root": str(REPOSITORY / "adapters")}]),
        },
        http_port=0,
        grpc_port=0,
        metrics_port=0,
    )
    with ServerProcess(options) as server:
        server.wait_ready()  # by an inference, which needs a key of its own
        yield server


def client_of(server: ServerProcess, key: str, protocol: str = "grpc") -> Client:
    url = server.grpc_url if protocol == "grpc" else server.http_url
    return Client(f"{protocol}://{url}", api_key=key)


@pytest.fixture(scope="module")
def emoji() -> Adapter:
    return load_adapter(REPOSITORY / "adapters" / "emoji", lora_task_id=7)


@pytest.fixture(scope="module")
def strict() -> Adapter:
    """Another adapter under the same id."""
    return load_adapter(REPOSITORY / "adapters" / "json", lora_task_id=7)


@pytest.mark.parametrize("key", [None, "a key that nobody has"])
def test_without_a_valid_key_every_door_is_closed(keyed: ServerProcess, key: str | None) -> None:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    refused: list[str] = []
    with tritonclient.grpc.InferenceServerClient(keyed.grpc_url) as triton:
        tokens, text = inputs_of(token_request(IDS, 2, False)), inputs_of(text_request("Hi", 2, False))
        for model, inputs in [("generation_unary", tokens), ("ensemble_unary", text)]:
            with pytest.raises(InferenceServerException) as error:
                triton.infer(model, inputs, headers=headers)
            refused.append(str(error.value))
    with tritonclient.http.InferenceServerClient(keyed.http_url) as triton_http:
        ask = tritonclient.http.InferInput("request", [1, 1], "BYTES")
        ask.set_data_from_numpy(np.array([[b'{"operation": "list"}']], object))
        query = tritonclient.http.InferInput("QUERY", [1, 1], "BYTES")
        query.set_data_from_numpy(np.array([[b"Hi"]], object))
        for model, inputs in [("adapters", [ask]), ("preprocessing", [query])]:
            with pytest.raises(InferenceServerException) as error:
                triton_http.infer(model, inputs, headers=dict(headers))  # which it writes to
            refused.append(str(error.value))
    for model in ("generation", "generation_unary", "ensemble", "ensemble_unary", "tensorrt_llm_bls"):
        answer = httpx2.post(f"http://{keyed.http_url}/v2/models/{model}/generate", json=TEXT, headers=headers)
        refused.append(answer.json()["error"])
    assert all("[UNAUTHENTICATED] no valid API key" in message for message in refused), refused


def test_a_key_opens_every_door(keyed: ServerProcess) -> None:
    headers = {"authorization": f"Bearer {ACME}"}
    texts: set[str] = set()
    for protocol in ("grpc", "http"):
        with client_of(keyed, ACME, protocol) as client:
            texts.add(client.generate(TEXT["text_input"], max_tokens=4).text)
            texts.add("".join(chunk.text for chunk in client.stream(TEXT["text_input"], max_tokens=4)))
            assert client.list_adapters() is not None
            assert client.tokenize("Hi")
    for model in ("generation", "generation_unary", "ensemble", "ensemble_unary", "tensorrt_llm_bls"):
        body = {**TEXT, "exclude_input_in_output": True, "authorization": f"Bearer {ACME}"}
        answer = httpx2.post(f"http://{keyed.http_url}/v2/models/{model}/generate", json=body, timeout=60).json()
        text = answer["text_output"]
        texts.add(text if isinstance(text, str) else text[0])
    with tritonclient.grpc.InferenceServerClient(keyed.grpc_url) as triton:
        request = text_request("The sea is", 4, False, exclude_input_in_output=flag())
        whole = triton.infer("ensemble_unary", inputs_of(request), headers=headers)
        texts.add(whole.as_numpy("text_output").reshape(-1)[0].decode())
    assert len(texts) == 1, texts


def test_two_tenants_use_the_same_id_and_neither_sees_the_others(
    keyed: ServerProcess, emoji: Adapter, strict: Adapter
) -> None:
    with client_of(keyed, ACME) as acme, client_of(keyed, BOLT, "http") as bolt:
        ours, theirs = acme.upload(emoji), bolt.upload(strict)
        assert ours.lora_digest != theirs.lora_digest
        for client, digest in ((acme, ours.lora_digest), (bolt, theirs.lora_digest)):
            assert client.generate("Hello", adapter=7, max_tokens=2).lora_digest == digest
            listed = [(info.lora_task_id, info.digest) for info in client.list_adapters() if info.digest]
            assert listed == [(7, digest)]
        acme.unload_adapter(7)
        with pytest.raises(AdapterNotFound):
            acme.generate("Hello", adapter=7, max_tokens=2)
        assert bolt.generate("Hello", adapter=7, max_tokens=2).lora_digest == theirs.lora_digest
        with pytest.raises(PermissionDenied):
            bolt.unload_adapter(7)
    with client_of(keyed, OPERATOR) as operator:
        assert ("bolt", 7) in [(info.tenant, info.lora_task_id) for info in operator.list_adapters()]


def test_the_servers_adapters_are_for_the_keys_that_name_them(keyed: ServerProcess) -> None:
    with client_of(keyed, ACME) as acme, client_of(keyed, BOLT) as bolt:
        assert acme.generate("Hello", lora_name="pirate", max_tokens=2).lora_digest
        assert [info.name for info in acme.list_adapters() if info.name] == ["pirate"]
        with pytest.raises(AdapterNotFound):
            bolt.generate("Hello", lora_name="pirate", max_tokens=2)
        assert [info.name for info in bolt.list_adapters() if info.name] == []


def test_a_stop_reaches_the_tenants_own_request_alone(keyed: ServerProcess) -> None:
    with client_of(keyed, ACME) as acme, client_of(keyed, BOLT) as bolt:
        chunks = acme.stream("Count:", max_tokens=500, end_id=-1, request_id="the same id")
        others = bolt.stream("Count:", max_tokens=500, end_id=-1, request_id="the same id")
        next(chunks), next(others)
        bolt.stop("the same id")
        assert [chunk.finish_reason for chunk in others if chunk.is_final] == ["cancelled"]
        next(chunks)
        with tritonclient.grpc.InferenceServerClient(keyed.grpc_url) as stock:
            headers = {"authorization": f"Bearer {ACME}"}
            inputs = inputs_of(stop_request())
            stock.infer("generation_unary", inputs, request_id="the same id", headers=headers)
        assert [chunk.finish_reason for chunk in chunks if chunk.is_final] == ["cancelled"]


def test_reuse_tells_of_the_tenants_own_prompts_alone(keyed: ServerProcess) -> None:
    with client_of(keyed, ACME) as acme, client_of(keyed, BOLT) as bolt:
        counts = [client.generate(LONG_PROMPT, max_tokens=1).num_cached_tokens for client in (acme, bolt, acme, bolt)]
    assert counts[:2] == [0, 0]
    assert counts[2] == counts[3]
    assert counts[2] is not None
    assert counts[2] > 0


def test_a_key_that_has_used_up_its_minute_is_told_when_to_come_back(keyed: ServerProcess) -> None:
    with client_of(keyed, SLOW) as slow, client_of(keyed, SLOW, "http") as over_http:
        with suppress(RateExceeded):  # unless another test has spent it
            slow.generate("Hello", max_tokens=1)
        for client in (slow, over_http):
            with pytest.raises(RateExceeded) as error:
                client.generate("Hello", max_tokens=1)
            assert 0 < error.value.retry_after_s <= 60


def test_a_key_taken_out_of_the_file_is_closed_at_once(keyed: ServerProcess, keys_file: Path) -> None:
    guest = {"key": "the key of a guest", "tenant": "guest", "base_model": True}
    with client_of(keyed, guest["key"]) as client:
        with pytest.raises(Unauthenticated):
            client.generate("Hello", max_tokens=1)
        write_keys(keys_file, *ENTRIES, guest)
        assert client.generate("Hello", max_tokens=1).num_output_tokens == 1
        write_keys(keys_file, *ENTRIES)
        with pytest.raises(Unauthenticated):
            client.generate("Hello", max_tokens=1)


class Walk:
    """Two tenants who do anything at every door of a real server, and what each has by then.

    owned: digests by key and task id. used, refused: how often an adapter answered, and how often there was none.
    """

    def __init__(self, keyed: ServerProcess, front_url: str, contents: list[Adapter], seed: int) -> None:
        self._keyed = keyed
        self._contents = contents
        self._rng = Random(seed)
        self._resources = ExitStack()
        self._clients = {
            (key, protocol): self._resources.enter_context(client_of(keyed, key, protocol))
            for key in (ACME, BOLT)
            for protocol in ("grpc", "http")
        }
        self._openai = self._resources.enter_context(httpx2.Client(base_url=front_url, timeout=60))
        self.owned: dict[tuple[str, int], str] = {}
        self.used = self.refused = 0

    def close(self) -> None:
        self._resources.close()

    def step(self) -> None:
        key, protocol = self._rng.choice([ACME, BOLT]), self._rng.choice(["grpc", "http"])
        client, task_id = self._clients[key, protocol], self._rng.choice(WALKED)
        match self._rng.choice(["upload", "unload", "list", *["use"] * 5]):
            case "upload":
                self._upload(key, client, task_id)
            case "unload":
                self._unload(key, client, task_id)
            case "list":
                listed = {(key, info.lora_task_id): info.digest for info in client.list_adapters()}
                listed = {place: digest for place, digest in listed.items() if place[1] in WALKED}
                assert listed == {place: digest for place, digest in self.owned.items() if place[0] == key}
            case "use":
                self._use(key, client, task_id)

    def _upload(self, key: str, client: Client, task_id: int) -> None:
        adapter = dataclasses.replace(self._rng.choice(self._contents), lora_task_id=task_id)
        try:
            digest = client.upload(adapter).lora_digest
        except AdapterConflict:
            assert (key, task_id) in self.owned
        else:
            assert digest == self.owned.setdefault((key, task_id), digest or "none")

    def _unload(self, key: str, client: Client, task_id: int) -> None:
        if key == BOLT:
            with pytest.raises(PermissionDenied):
                client.unload_adapter(task_id)
        elif (key, task_id) in self.owned:
            client.unload_adapter(task_id)
            del self.owned[key, task_id]
        else:
            with pytest.raises(AdapterNotFound):
                client.unload_adapter(task_id)

    def _use(self, key: str, client: Client, task_id: int) -> None:
        door = self._rng.choice(["whole", "stream", "generate", "ensemble_unary", "openai"])
        if door == "openai":
            return self._complete(key)
        if door in ("generate", "ensemble_unary"):
            model = "generation_unary" if door == "generate" else door
            body = {**TEXT, "max_tokens": 1, "lora_task_id": task_id, "authorization": f"Bearer {key}"}
            answer = httpx2.post(f"http://{self._keyed.http_url}/v2/models/{model}/generate", json=body, timeout=60)
            digest = answer.json().get("lora_digest") if answer.is_success else None
            assert answer.is_success or "[NOT_FOUND]" in answer.text
        else:
            try:
                options = {"adapter": task_id, "max_tokens": 1}
                found = client.generate("Hi", **options) if door == "whole" else [*client.stream("Hi", **options)][-1]
                digest = found.lora_digest
            except AdapterNotFound:
                digest = None
        assert digest == self.owned.get((key, task_id)), door
        self.used += digest is not None
        self.refused += digest is None

    def _complete(self, key: str) -> None:
        """By the server's own adapter, which only one of the keys names."""
        body = {"model": "pirate", "prompt": "Hi", "max_tokens": 1}
        answer = self._openai.post("/completions", json=body, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == (200 if key == ACME else 404)


def test_nobody_meets_anothers_adapter_at_any_door_whatever_both_do(
    keyed: ServerProcess, front_url: str, emoji: Adapter, strict: Adapter
) -> None:
    with closing(Walk(keyed, front_url, [emoji, strict], seed=1)) as walk:
        for _ in range(80):
            walk.step()
        assert walk.used > 5
        assert walk.refused > 5


@pytest.fixture(scope="module")
def front_url(keyed: ServerProcess, keys_file: Path) -> Iterator[str]:
    """The OpenAI front, which has the same file and no adapters of its own."""
    catalogue = Catalogue("base", {}, KeyRing(keys_file), is_forwarding=True)
    with openai_front(catalogue, keyed.grpc_url) as url:
        yield url


def test_the_openai_front_serves_each_caller_what_its_key_may_use(front_url: str, keyed: ServerProcess) -> None:
    def chat(user: openai.OpenAI, model: str) -> str | None:
        answer = user.chat.completions.create(model=model, messages=QUESTION, max_tokens=8, temperature=0)
        return answer.choices[0].message.content

    with (
        openai.OpenAI(base_url=front_url, api_key=ACME, max_retries=0) as acme,
        openai.OpenAI(base_url=front_url, api_key=BOLT, max_retries=0) as bolt,
        openai.OpenAI(base_url=front_url, api_key="a key that nobody has", max_retries=0) as stranger,
        openai.OpenAI(base_url=front_url, api_key=SLOW, max_retries=0) as slow,
        client_of(keyed, ACME) as client,
    ):
        assert [model.id for model in acme.models.list()] == ["base", "pirate"]
        assert [model.id for model in bolt.models.list()] == ["base"]
        assert chat(acme, "pirate") == client.generate(messages=QUESTION, lora_name="pirate", max_tokens=8).text
        assert chat(bolt, "base") is not None
        with pytest.raises(openai.NotFoundError):
            chat(bolt, "pirate")
        with pytest.raises(openai.AuthenticationError):
            chat(stranger, "base")
        with suppress(openai.RateLimitError):  # unless another test has spent it
            chat(slow, "base")
        with pytest.raises(openai.RateLimitError) as error:
            chat(slow, "base")
        assert 1 <= int(error.value.response.headers["retry-after"]) <= 60


def test_metrics_count_each_tenant(keyed: ServerProcess) -> None:
    with client_of(keyed, ACME) as acme:
        acme.generate("Hello", max_tokens=1)

    def counted() -> bool:
        text = httpx2.get(keyed.metrics_url).text
        return 'multilora_client_requests_total{client="acme"}' in text

    assert wait_for(counted)


def wait_for(condition: Any) -> bool:
    """Metrics are published once a second."""
    ended = threading.Event()
    return any(condition() or ended.wait(0.2) for _ in range(100))


def test_no_error_tells_a_key(keyed: ServerProcess) -> None:
    with client_of(keyed, BOLT) as bolt, pytest.raises(MultiloraClientError) as error:
        bolt.generate("Hello", lora_name="nobody-has-it", max_tokens=1)
    assert BOLT not in str(error.value)
