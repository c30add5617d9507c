"""Adapters as clients send them: weights once, then the id; and every way in which that can go wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count, islice
from pathlib import Path

import httpx2
import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import save_file
from support.wire import (
    GrpcClient,
    HttpClient,
    adapter_files,
    adapter_tensors,
    error_of,
    infer,
    stream_texts,
    tensors,
    text_of,
)
from tritonclient.utils import InferenceServerException

from multilora_client import Adapter, AdapterNotFound, AdapterTensors, Client, InvalidRequest, load_adapter
from multilora_engine.tritonserver import ServerProcess
from multilora_wire.adapter_names import task_id_of_name

PIRATE = Path(__file__).parents[2] / "adapters" / "pirate"
CHAT = '[{"role": "user", "content": "Who are you?"}]'
PROMPT = tensors(messages=CHAT, max_tokens=6, exclude_input_in_output=True)
STATUS = {"INVALID_ARG": "StatusCode.INVALID_ARGUMENT", "ALREADY_EXISTS": "StatusCode.ALREADY_EXISTS"}
fresh_ids = count(1000)


@pytest.fixture
def adapter(pirate: Adapter) -> Adapter:
    """The pirate under a task id that the server has never seen."""
    return Adapter(next(fresh_ids), pirate.content)


def as_dtype(tensors: AdapterTensors, dtype: str) -> AdapterTensors:
    """The same bf16 numbers in another type; every one of them fits."""
    values = (tensors.weights.astype(np.uint32) << 16).view(np.float32)
    if dtype == "BF16":
        return tensors
    return AdapterTensors(values.astype(np.float16) if dtype == "FP16" else values, tensors.config, dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("dtype", ["FP16", "BF16", "FP32"])
def test_weights_come_once_and_the_id_alone_is_enough_afterwards(
    triton_grpc: GrpcClient, triton_http: HttpClient, adapter: Adapter, dtype: str, protocol: str
) -> None:
    client = triton_grpc if protocol == "grpc" else triton_http
    sent = Adapter(adapter.lora_task_id, as_dtype(adapter.content, dtype))
    first = infer(client, "generation_unary", PROMPT | adapter_tensors(sent))
    later = infer(client, "ensemble_unary", PROMPT | tensors(lora_task_id=adapter.lora_task_id))
    base = infer(client, "generation_unary", PROMPT)
    assert text_of(first) == text_of(later) != text_of(base)
    for result in (first, later):
        assert int(result.as_numpy("lora_task_id_out").item()) == adapter.lora_task_id
        assert result.as_numpy("lora_digest").item() == first.as_numpy("lora_digest").item() != b""
    assert base.as_numpy("lora_digest").item() == b""


def test_weights_arrive_through_the_streaming_ensemble_too(
    server: ServerProcess, triton_grpc: GrpcClient, adapter: Adapter
) -> None:
    request = PROMPT | tensors(stream=True)
    first = stream_texts(server.grpc_url, "ensemble", request | adapter_tensors(adapter))
    later = text_of(infer(triton_grpc, "generation_unary", PROMPT | tensors(lora_task_id=adapter.lora_task_id)))
    assert "".join(first) == later


def test_three_columns_rows_in_any_order_and_the_same_bytes_again_are_all_fine(
    triton_grpc: GrpcClient, adapter: Adapter
) -> None:
    order = np.random.default_rng(0).permutation(len(adapter.content.config))
    weights, config = adapter.content.weights[order], adapter.content.config[order][:, :3].copy()
    shuffled = replace(adapter.content, weights=weights, config=config, origin=None)
    variants = [adapter, Adapter(adapter.lora_task_id, shuffled), adapter]
    digests = {
        infer(triton_grpc, "generation_unary", PROMPT | adapter_tensors(variant)).as_numpy("lora_digest").item()
        for variant in variants
    }
    assert len(digests) == 1


def test_an_uncached_id_is_not_found_with_the_words_that_clients_look_for(
    server: ServerProcess, triton_grpc: GrpcClient, triton_http: HttpClient
) -> None:
    request = PROMPT | tensors(lora_task_id=987_654_321)
    words = "LoRA task 987654321 not found in cache. Please send LoRA weights with request"
    words += " (nor in its sources: directory: no folder is named 987654321, and the id of no folder's name is that)"
    for client, status in ((triton_grpc, "StatusCode.NOT_FOUND"), (triton_http, "404")):
        with pytest.raises(InferenceServerException) as caught:
            infer(client, "generation_unary", request, request_id="ab12")
        assert error_of(caught.value) == (status, f"[NOT_FOUND] {words} (request ab12)")
    for model in ("generation", "ensemble"):
        with pytest.raises(InferenceServerException) as caught:
            stream_texts(server.grpc_url, model, request, request_id="cd34")
        assert f"[NOT_FOUND] {words} (request cd34)" in str(caught.value.message())


def test_the_id_zero_is_an_adapter_like_any_other_in_band(triton_grpc: GrpcClient, pirate: Adapter) -> None:
    zero = Adapter(0, pirate.content)
    result = infer(triton_grpc, "generation_unary", PROMPT | adapter_tensors(zero))
    assert result.as_numpy("lora_digest").item() != b""


def test_an_upload_without_a_prompt_only_stores(client: Client, triton_grpc: GrpcClient, adapter: Adapter) -> None:
    stored = client.upload(adapter)
    result = infer(triton_grpc, "generation_unary", PROMPT | tensors(lora_task_id=adapter.lora_task_id))
    assert result.as_numpy("lora_digest").item().decode() == stored.lora_digest


def test_uploads_of_one_id_by_many_clients_at_once_store_it_once(server: ServerProcess, adapter: Adapter) -> None:
    def upload(_: int) -> str:
        with Client(f"grpc://{server.grpc_url}") as client:
            return client.upload(adapter).lora_digest

    with Client(f"grpc://{server.grpc_url}") as client, ThreadPoolExecutor(6) as threads:
        last, before = client.adapter_events().last, client.adapter_stats()["tiers"]["insertions"]
        assert len(set(threads.map(upload, range(6)))) == 1
        events = client.adapter_events(since=last).events
        assert client.adapter_stats()["tiers"]["insertions"] == before + 1
    assert [event.kind for event in events if event.lora_task_id == adapter.lora_task_id] == ["uploaded"]


def test_adapters_sent_at_once_arrive_byte_for_byte(server: ServerProcess, client: Client, pirate: Adapter) -> None:
    """A door packs them from the memory of their requests, after it has taken further requests."""
    random, layers = np.random.default_rng(0), pirate.content.config[:, 1]

    def draw(num_layers: int) -> AdapterTensors:
        kept = layers < num_layers
        weights = random.standard_normal(pirate.content.weights[kept].shape).astype(np.float16)
        return AdapterTensors(weights * (pirate.content.weights[kept] != 0), pirate.content.config[kept], "FP16")

    adapters = [Adapter(next(fresh_ids), draw(num_layers)) for num_layers in range(1, 13)]

    def upload(adapter: Adapter) -> str:
        with Client(f"grpc://{server.grpc_url}") as uploader:
            return uploader.upload(adapter).lora_digest

    one_by_one = [upload(adapter) for adapter in adapters]
    for adapter in adapters:
        client.unload_adapter(adapter.lora_task_id)
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(upload, adapters)) == one_by_one
    assert len(set(one_by_one)) == len(adapters)


def edited(adapter: Adapter, name: str, index: object, value: float) -> dict[str, np.ndarray]:
    """The adapter's tensors with one value changed."""
    arrays = adapter_tensors(adapter)
    arrays[name] = arrays[name].copy()
    arrays[name][index] = value  # type: ignore[index]
    return arrays


def without(arrays: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {key: value for key, value in arrays.items() if key != name}


WEIGHTS = "lora_weights_bf16"
BAD_ADAPTERS = {
    "weights without config": (lambda a: without(adapter_tensors(a), "lora_config"), "must have both lora_weights and"),
    "config without weights": (lambda a: without(adapter_tensors(a), WEIGHTS), "must have both lora_weights and"),
    "without id": (
        lambda a: without(adapter_tensors(a), "lora_task_id"),
        "lora_task_id must be set for LoRA inference",
    ),
    "NaN": (lambda a: edited(a, WEIGHTS, (0, 3, 5), np.nan), "row 3 .* holds nan at position 5"),
    "infinity": (lambda a: edited(a, WEIGHTS, (0, 0, 0), np.inf), "holds inf"),
    "rank 0": (lambda a: edited(a, "lora_config", (0, 2, 2), 0), "row 2: Expected adapterSize to be > 0"),
    "rank too large": (lambda a: edited(a, "lora_config", (0, 2, 2), 65), r"Invalid low_rank \(65\)"),
    "rank too small": (lambda a: edited(a, "lora_config", (0, 2, 2), 1), "declared rank or module is wrong"),
    "layer out of range": (lambda a: edited(a, "lora_config", (0, 2, 1), 30), "Expected layerId .* 30"),
    "unknown module": (lambda a: edited(a, "lora_config", (0, 2, 0), 13), "lora module 13 not enabled"),
    "duplicate row": (lambda a: edited(a, "lora_config", (0, 0, slice(None)), 0) | _duplicate(a), "both adapt"),
    "narrow rows": (
        lambda a: adapter_tensors(a) | {WEIGHTS: adapter_tensors(a)[WEIGHTS][:, :, :3000]},
        "to few values",
    ),
    "missing row": (
        lambda a: adapter_tensors(a) | {WEIGHTS: adapter_tensors(a)[WEIGHTS][:, 1:]},
        "each row needs both",
    ),
    "two dtypes": (
        lambda a: adapter_tensors(a) | {"lora_weights_fp32": adapter_tensors(a)[WEIGHTS]},
        "an adapter has one dtype",
    ),
}


def _duplicate(adapter: Adapter) -> dict[str, np.ndarray]:
    arrays = adapter_tensors(adapter)
    arrays["lora_config"] = arrays["lora_config"].copy()
    arrays["lora_config"][0, 1] = arrays["lora_config"][0, 0]
    arrays[WEIGHTS] = arrays[WEIGHTS].copy()
    arrays[WEIGHTS][0, 1] = arrays[WEIGHTS][0, 0]
    return arrays


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_pefts_files_are_the_adapter_that_its_tensors_are(
    triton_grpc: GrpcClient, triton_http: HttpClient, adapter: Adapter, protocol: str
) -> None:
    client = triton_grpc if protocol == "grpc" else triton_http
    as_tensors = infer(client, "generation_unary", PROMPT | adapter_tensors(adapter))
    files = adapter_files(PIRATE, next(fresh_ids))
    first = infer(client, "ensemble_unary", PROMPT | files)
    later = infer(client, "generation_unary", PROMPT | {"lora_task_id": files["lora_task_id"]})
    assert text_of(first) == text_of(later) == text_of(as_tensors)
    digests = {answer.as_numpy("lora_digest").item() for answer in (as_tensors, first, later)}
    assert len(digests) == 1
    both = PROMPT | files | adapter_tensors(adapter)
    with pytest.raises(InferenceServerException, match="not as both; the request has"):
        infer(client, "generation_unary", both)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_an_adapter_of_another_model_is_refused_though_its_rows_are_as_long(
    client: Client, http_client: Client, tmp_path: Path, protocol: str
) -> None:
    """575 and 577 are as many as the 576 and 576 of q in the model that is served."""
    key = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{key}.lora_A.weight": torch.ones(2, 575), f"{key}.lora_B.weight": torch.ones(577, 2)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    sender = client if protocol == "grpc" else http_client
    other = load_adapter(tmp_path, next(fresh_ids))
    with pytest.raises(InvalidRequest, match="q_proj has 575 inputs and 577 outputs there, 576 inputs and 576 outputs"):
        sender.generate("hi", adapter=other, max_tokens=1)
    with pytest.raises(AdapterNotFound):
        sender.generate("hi", adapter=other.lora_task_id, max_tokens=1)


@pytest.mark.parametrize("case", BAD_ADAPTERS)
def test_a_bad_adapter_is_refused_by_name_and_not_cached(triton_grpc: GrpcClient, adapter: Adapter, case: str) -> None:
    build, message = BAD_ADAPTERS[case]
    with pytest.raises(InferenceServerException, match=message) as caught:
        infer(triton_grpc, "generation_unary", PROMPT | build(adapter))
    assert error_of(caught.value)[0] == STATUS["INVALID_ARG"]
    with pytest.raises(InferenceServerException, match="not found in cache"):
        infer(triton_grpc, "generation_unary", PROMPT | tensors(lora_task_id=adapter.lora_task_id))


def test_other_weights_under_a_cached_id_are_refused_and_the_first_keep_answering(
    triton_grpc: GrpcClient, adapter: Adapter
) -> None:
    first = infer(triton_grpc, "generation_unary", PROMPT | adapter_tensors(adapter))
    other = adapter_files(PIRATE.parent / "json", adapter.lora_task_id)
    with pytest.raises(InferenceServerException, match="is cached with other weights") as caught:
        infer(triton_grpc, "generation_unary", PROMPT | other)
    assert error_of(caught.value)[0] == STATUS["ALREADY_EXISTS"]
    again = infer(triton_grpc, "generation_unary", PROMPT | tensors(lora_task_id=adapter.lora_task_id))
    assert again.as_numpy("lora_digest").item() == first.as_numpy("lora_digest").item()


def test_our_client_sends_weights_again_by_itself_when_they_were_evicted(
    server: ServerProcess, adapter: Adapter
) -> None:
    with Client(f"grpc://{server.grpc_url}") as client:
        before = client.generate("Who are you?", adapter=adapter, max_tokens=4)
        evict_everything(client, adapter)
        after = client.generate("Who are you?", adapter=adapter, max_tokens=4)
    assert after.text == before.text
    assert after.lora_task_id == adapter.lora_task_id


def evict_everything(client: Client, adapter: Adapter) -> None:
    """Upload the same weights under so many other ids that the host tier (256 MiB) cannot have kept `adapter`."""
    for task_id in islice(fresh_ids, 100):
        client.upload(Adapter(task_id, adapter.content))
    with pytest.raises(AdapterNotFound):
        client.generate("x", adapter=adapter.lora_task_id, max_tokens=1)


def test_an_operator_sees_pins_and_unloads_an_adapter(client: Client, http_client: Client, adapter: Adapter) -> None:
    task_id = adapter.lora_task_id
    digest = client.upload(adapter).lora_digest
    (info,) = (info for info in client.list_adapters() if info.lora_task_id == task_id)
    assert (info.digest, info.is_pinned, info.num_pins) == (digest, False, 0)
    assert http_client.pin_adapter(task_id).is_pinned
    assert client.unload_adapter(task_id).digest == digest
    with pytest.raises(AdapterNotFound):
        client.generate("Hello", adapter=task_id, max_tokens=1)
    happened = [event.kind for event in client.adapter_events().events if event.lora_task_id == task_id]
    assert (happened[0], happened[-1]) == ("uploaded", "unloaded")
    with pytest.raises(AdapterNotFound, match=f"LoRA task {task_id} not found in cache"):
        http_client.pin_adapter(task_id)


def test_what_adapters_do_is_on_the_metrics_port(server: ServerProcess, client: Client, adapter: Adapter) -> None:
    client.generate("Hello", adapter=adapter, max_tokens=3)
    label = f'lora_task_id="{adapter.lora_task_id}"'
    # The server of all tests has many adapters; one that comes late may be counted with the others.
    counted = re.compile(rf'multilora_lora_requests_total\{{.*({label}|lora_task_id="other").*\}} [1-9]')
    deadline = time.monotonic() + 30
    while not counted.search(text := httpx2.get(server.metrics_url).text):
        assert time.monotonic() < deadline, text
    tiers = dict(re.findall(r'multilora_lora_tier_adapters\{.*tier="(\w+)".*\} (\d+)', text))
    assert int(tiers["host"]) >= 1


def loaded_levels(server: ServerProcess, name: str) -> set[str]:
    """The levels of memory at which the metrics port shows an adapter; gateways take a series at 0 for none."""
    families = text_string_to_metric_families(httpx2.get(server.metrics_url).text)
    samples = next((f.samples for f in families if f.name == "multilora_lora_adapter_loaded"), [])
    return {s.labels["level"] for s in samples if s.labels["adapter_name"] == name and s.value == 1}


def wait_for_levels(server: ServerProcess, name: str, levels: set[str]) -> None:
    deadline = time.monotonic() + 30
    while (shown := loaded_levels(server, name)) != levels:
        assert time.monotonic() < deadline, shown


def test_gateways_see_on_the_metrics_port_which_adapters_are_in_memory(
    server: ServerProcess, client: Client, adapter: Adapter
) -> None:
    name = str(adapter.lora_task_id)
    client.upload(adapter)
    wait_for_levels(server, name, {"cpu"})
    client.generate("Hello", adapter=adapter, max_tokens=1)
    wait_for_levels(server, name, {"gpu"})
    evict_everything(client, adapter)
    wait_for_levels(server, name, set())
    text = httpx2.get(server.metrics_url).text
    counts = dict(re.findall(r"multilora_((?:num|max)_\w+_lora_adapters)(?:\{.*\})? (\d+)", text))
    assert int(counts["max_gpu_lora_adapters"]) == 32
    assert int(counts["num_cpu_loaded_lora_adapters"]) >= int(counts["num_gpu_loaded_lora_adapters"])


def test_an_adapter_goes_by_its_name_through_every_door(
    client: Client, triton_grpc: GrpcClient, pirate: Adapter
) -> None:
    name, nameless = tensors(lora_name=f"acme/pirate-{next(fresh_ids)}"), adapter_tensors(pirate)
    del nameless["lora_task_id"]
    first = infer(triton_grpc, "generation_unary", PROMPT | nameless | name)
    later = infer(triton_grpc, "ensemble_unary", PROMPT | name)
    assert text_of(first) == text_of(later)
    assert first.as_numpy("lora_task_id_out") == later.as_numpy("lora_task_id_out")
    with pytest.raises(AdapterNotFound, match="LoRA adapter 'acme/nobody' not found in cache"):
        client.generate("Hello", lora_name="acme/nobody", max_tokens=1)


def test_an_alias_gives_a_session_one_member_through_every_door(
    server: ServerProcess, client: Client, http_client: Client, triton_grpc: GrpcClient
) -> None:
    program = str(Path(sys.executable).with_name("multilora"))
    command = [program, "adapters", "alias", "style=pirate:1,json:1", "--json", "--url", server.grpc_url]
    (made,) = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)
    assert made == {"name": "style", "members": [{"name": "pirate", "weight": 1}, {"name": "json", "weight": 1}]}
    told = {}
    for session in ("Ann", "Bob", "Cleo", "Dora"):
        asked = PROMPT | tensors(lora_name="style", lora_session=session)
        answers = [infer(triton_grpc, model, asked) for model in ("generation_unary", "ensemble_unary")]
        (named,) = {answer.as_numpy("lora_name_out").item().decode() for answer in answers}
        (text,) = {text_of(answer) for answer in answers}
        assert answers[0].as_numpy("lora_task_id_out").item() == task_id_of_name(named)
        for model, flag in (("generation", "streaming"), ("ensemble", "stream"), ("tensorrt_llm", "streaming")):
            assert "".join(stream_texts(server.grpc_url, model, asked | tensors(**{flag: True}))) == text
        options = {"messages": json.loads(CHAT), "max_tokens": 6}
        again = http_client.generate(lora_name="style", lora_session=session, **options)
        assert (
            (again.text, again.lora_name) == (text, named) == (client.generate(lora_name=named, **options).text, named)
        )
        told[named] = text
    assert told.keys() == {"pirate", "json"}, "these sessions have both"
    assert told["pirate"] != told["json"]
    client.remove_alias("style")
    with pytest.raises(AdapterNotFound, match="LoRA adapter 'style' not found in cache"):
        client.generate("Hello", lora_name="style", max_tokens=1)


def test_an_adapter_that_starts_later_uses_what_the_base_has_computed(
    triton_grpc: GrpcClient, adapter: Adapter, client: Client
) -> None:
    client.upload(adapter)
    text = "One, two, three, four, five, six, seven, eight, nine, ten, and then once more from one to twenty, please:"
    base = infer(triton_grpc, "generation_unary", tensors(text_input=text, max_tokens=2))
    num_tokens = base.as_numpy("num_input_tokens").item()
    assert num_tokens > 18
    late = tensors(text_input=text, max_tokens=2, lora_task_id=adapter.lora_task_id, lora_start=17)
    answered = infer(triton_grpc, "generation_unary", late)
    assert answered.as_numpy("num_cached_tokens").item() == 16
    assert answered.as_numpy("lora_digest").item() != b""
    by_ensemble = infer(triton_grpc, "ensemble_unary", late)
    assert by_ensemble.as_numpy("text_output").item() == answered.as_numpy("text_output").item()
    with pytest.raises(InferenceServerException, match=f"lora_start is {num_tokens} and the prompt has {num_tokens} "):
        infer(triton_grpc, "ensemble_unary", late | tensors(lora_start=num_tokens))


def test_a_set_is_asked_for_by_its_members_or_by_its_name_through_every_door(
    server: ServerProcess, client: Client, http_client: Client, triton_grpc: GrpcClient, adapter: Adapter
) -> None:
    client.upload(adapter)
    alone = client.generate(messages=json.loads(CHAT), max_tokens=6, adapter=adapter.lora_task_id)
    same = {adapter.lora_task_id: 1.0}
    made = client.combine_adapters(f"set-{adapter.lora_task_id}", same)
    assert [member.weight for member in made.members] == [1.0]
    assert made.digest != alone.lora_digest
    named = client.generate(messages=json.loads(CHAT), max_tokens=6, lora_name=f"set-{adapter.lora_task_id}")
    for one in (client, http_client):
        answer = one.generate(messages=json.loads(CHAT), max_tokens=6, lora_set=same)
        assert (answer.text, answer.lora_digest) == (alone.text, made.digest) == (named.text, named.lora_digest)
    members = {
        "lora_set_task_ids": np.array([[adapter.lora_task_id]], np.uint64),
        "lora_set_weights": np.array([[1.0]], np.float32),
    }
    assert text_of(infer(triton_grpc, "ensemble_unary", PROMPT | members)) == alone.text
    assert "".join(stream_texts(server.grpc_url, "ensemble", PROMPT | members)) == alone.text
    with pytest.raises(AdapterNotFound, match="LoRA task 999999 not found in cache"):
        client.generate(messages=json.loads(CHAT), max_tokens=6, lora_set={999999: 1.0})
    for name in (made.name, adapter.lora_task_id):
        client.unload_adapter(name)
