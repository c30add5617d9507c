"""The doors of other backends' protocols, asked as their clients ask; answers are those of transformers and PEFT."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
import tritonclient.grpc as triton
from peft import LoraConfig
from support.conformance import PROMPT, row
from support.oracle import ATTENTION, MLP, Oracle
from support.stock_clients import TIMEOUT_S, Tensors, inputs_of
from transformers import AutoModelForCausalLM, AutoTokenizer
from tritonclient.utils import InferenceServerException

from multilora_engine.tritonserver import ServerProcess
from multilora_engine.tritonserver.upstream_models import UpstreamModels
from servers.tiny_server import tiny_server

NUM_TOKENS = 6


@dataclass
class Stage:
    """A server with a door of another protocol, and what its model answers by transformers and PEFT.

    adapters: the root of its source.
    """

    server: ServerProcess
    model: str
    oracle: Oracle
    tokenizer: Any
    adapters: Path

    def answer(self, adapter: str | None, num_tokens: int = NUM_TOKENS) -> str:
        """The greedy answer to the prompt."""
        prompt = self.tokenizer.encode(PROMPT)
        options = {"max_new_tokens": num_tokens, "do_sample": False, "pad_token_id": 0}
        made = self.oracle.generate(adapter, prompt, **options)[0, len(prompt) :]
        return str(self.tokenizer.decode(made, skip_special_tokens=True))

    def generate(self, endpoint: str = "generate", **body: Any) -> httpx2.Response:
        url = f"http://{self.server.http_url}/v2/models/{self.model}/{endpoint}"
        return httpx2.post(url, json={"text_input": PROMPT, **body}, timeout=TIMEOUT_S)

    def infer(self, request_id: str = "", **tensors: Any) -> Any:
        with triton.InferenceServerClient(self.server.grpc_url) as client:
            return client.infer(self.model, inputs_of(prompt_with(tensors)), request_id=request_id)

    def stream(self, parameters: dict[str, Any] | None = None, **tensors: Any) -> list[Any]:
        """All responses to one request by a gRPC stream."""
        responses: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
        with triton.InferenceServerClient(self.server.grpc_url) as client:
            client.start_stream(lambda result, error: responses.put((result, error)))
            client.async_stream_infer(self.model, inputs_of(prompt_with(tensors)), parameters=parameters)
            client.stop_stream()
        results = []
        while not responses.empty():
            result, error = responses.get()
            if error is not None:
                raise error
            results.append(result)
        return results


def prompt_with(tensors: dict[str, Any]) -> Tensors:
    return {"text_input": text(PROMPT), **tensors}


def text(value: str) -> np.ndarray:
    return np.array([value.encode()], np.object_)


def integer(value: int) -> np.ndarray:
    return np.array([value], np.int32)


def flag(value: bool = True) -> np.ndarray:
    return np.array([value])


def text_of(result: Any) -> str:
    (value,) = result.as_numpy("text_output")
    return str(value.decode())


@contextmanager
def stage(models: UpstreamModels, model: str, directory: Path) -> Iterator[Stage]:
    sources = json.dumps([{"source": "directory", "root": str(directory)}])
    with tiny_server(models, lora_sources=sources) as (server, checkpoint):
        oracle = Oracle(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32), directory)
        for seed, name in enumerate(("pirate", "parrot")):
            oracle.add(name, LoraConfig(r=4, lora_alpha=64, target_modules=ATTENTION + MLP), seed)
        yield Stage(server, model, oracle, AutoTokenizer.from_pretrained(checkpoint), directory)


@pytest.fixture(scope="module")
def llmapi(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(UpstreamModels.LLMAPI, "tensorrt_llm", tmp_path_factory.mktemp("llmapi")) as made:
        yield made


@pytest.fixture(scope="module")
def llmapi_streams(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(UpstreamModels.LLMAPI_DECOUPLED, "tensorrt_llm", tmp_path_factory.mktemp("llmapi_streams")) as made:
        yield made


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(UpstreamModels.VLLM, "vllm_model", tmp_path_factory.mktemp("vllm")) as made:
        yield made


def lora(stage: Stage, name: str, task_id: int) -> dict[str, np.ndarray]:
    path = str(stage.adapters / name)
    return {"lora_id": np.array([task_id], np.uint64), "lora_name": text(name), "lora_path": text(path)}


@row("llmapi", "the README's requests: prompt and answer in one text, 32 tokens unless asked")
def test_llmapi_answers_by_http_and_grpc(llmapi: Stage) -> None:
    answer = llmapi.answer(None)
    body = llmapi.generate(sampling_param_max_tokens=NUM_TOKENS).json()
    assert body == {"model_name": "tensorrt_llm", "model_version": "1", "text_output": PROMPT + answer}
    assert llmapi.generate().json()["text_output"] == PROMPT + llmapi.answer(None, 32)
    excluded = {"sampling_param_exclude_input_from_output": flag(), "sampling_param_max_tokens": integer(NUM_TOKENS)}
    assert text_of(llmapi.infer(**excluded)) == answer
    assert text_of(llmapi.infer(sampling_param_max_tokens=integer(NUM_TOKENS))) == PROMPT + answer


@row("llmapi", "reasons, log-probs and metrics are strings")
def test_llmapi_tells_strings(llmapi: Stage) -> None:
    asked = {"return_finish_reason": True, "return_stop_reason": True, "return_cumulative_logprob": True}
    body = llmapi.generate(sampling_param_max_tokens=4, sampling_param_return_perf_metrics=True, **asked).json()
    told = {name: value for name, value in body.items() if name not in ("model_name", "model_version")}
    assert all(isinstance(value, str) for value in told.values())
    assert (told["finish_reason"], told["stop_reason"]) == ("length", "None")
    assert float(told["cumulative_logprob"]) < 0
    assert told["acceptance_rate"] == "0.0"
    assert int(told["kv_cache_alloc_total_blocks"]) > 0
    assert len(told) == 16
    stop = llmapi.answer(None)[2:4]
    body = llmapi.generate(sampling_param_stop=[stop, "nowhere"], **asked).json()
    assert (body["finish_reason"], body["stop_reason"]) == ("stop", stop)
    assert body["text_output"] == PROMPT + llmapi.answer(None, 32).partition(stop)[0]


@row("llmapi", "an adapter by lora_id, lora_name and lora_path inside lora_sources")
def test_llmapi_adapters(llmapi: Stage) -> None:
    for _ in range(2):
        result = llmapi.infer(**lora(llmapi, "pirate", 7), sampling_param_max_tokens=integer(NUM_TOKENS))
        assert text_of(result) == PROMPT + llmapi.answer("pirate")
    assert len({llmapi.answer(adapter) for adapter in ("pirate", "parrot", None)}) == 3
    with pytest.raises(InferenceServerException, match="LoRA task 7 is cached with other weights"):
        llmapi.infer(**lora(llmapi, "parrot", 7))
    assert text_of(llmapi.infer(**lora(llmapi, "parrot", 8))) == PROMPT + llmapi.answer("parrot", 32)
    with pytest.raises(InferenceServerException, match="adapters cannot be loaded from '/etc'"):
        llmapi.infer(**lora(llmapi, "/etc", 9))
    only_id = {"lora_id": np.array([7], np.uint64)}
    with pytest.raises(InferenceServerException, match="must all be provided together"):
        llmapi.infer(**only_id)


@row("llmapi", "a stop request and its original get CANCELLED")
def test_llmapi_stops(llmapi: Stage) -> None:
    stop = {"text_input": np.empty([1], np.bytes_), "stop": flag()}
    with pytest.raises(InferenceServerException) as caught:
        llmapi.infer("unknown", **stop)
    assert caught.value.status() == "StatusCode.CANCELLED"
    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    long = prompt_with({"sampling_param_max_tokens": integer(480)})
    with triton.InferenceServerClient(llmapi.server.grpc_url) as client:
        client.async_infer("tensorrt_llm", inputs_of(long), lambda result, error: ended.put(error), request_id="long")
        while ended.empty():  # until the original is there
            assert "Request cancelled by client" in llmapi.generate(id="long", text_input="", stop=True).text
        assert ended.get(timeout=TIMEOUT_S).status() == "StatusCode.CANCELLED"


@row("llmapi", "requests of other protocols", "refused")
def test_llmapi_refuses_other_protocols(llmapi: Stage) -> None:
    for body, reason in (
        ({"max_tokens": 5}, "which has it as sampling_param_max_tokens"),
        ({"parameters": {"temperature": 0.5}}, "which has it as sampling_param_temperature"),
        ({"lora_task_id": 7}, "lora_id, lora_name and lora_path"),
        ({"streaming": True}, "Streaming is only supported in decoupled mode."),
    ):
        response = llmapi.generate(**body)
        assert (response.status_code, reason in response.text) == (400, True), response.text
    with pytest.raises(InferenceServerException, match="unexpected inference input 'sampling_parameters'"):
        llmapi.infer(sampling_parameters=text("{}"))


@pytest.mark.long(reason="it has a server of its own")
@row("llmapi", "each response of a stream repeats the text so far")
def test_llmapi_streams(llmapi_streams: Stage) -> None:
    asked = {"streaming": flag(), "sampling_param_max_tokens": integer(NUM_TOKENS), **lora(llmapi_streams, "pirate", 7)}
    texts = [text_of(result) for result in llmapi_streams.stream(**asked)]
    assert texts[-1] == llmapi_streams.answer("pirate")
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    events = llmapi_streams.generate("generate_stream", streaming=True, sampling_param_max_tokens=NUM_TOKENS).text
    (*_, last) = (json.loads(event.removeprefix("data: ")) for event in events.split("\n\n") if event)
    assert last["text_output"] == llmapi_streams.answer(None)
    assert text_of(llmapi_streams.stream()[0]) == PROMPT + llmapi_streams.answer(None, 32)


GREEDY = {"temperature": "0", "max_tokens": str(NUM_TOKENS)}


@row("vllm", "the README's request: the answer after the prompt")
def test_vllm_answers(vllm: Stage) -> None:
    answer = vllm.answer(None, 16)
    body = vllm.generate(parameters={"stream": False, "temperature": 0}).json()
    assert body == {"model_name": "vllm_model", "model_version": "1", "text_output": PROMPT + answer}
    sampling = {"sampling_parameters": text(json.dumps(GREEDY))}
    (whole,) = vllm.stream(GREEDY, **sampling, exclude_input_in_output=flag(False))
    assert text_of(whole) == PROMPT + vllm.answer(None)
    (excluded,) = vllm.stream(**sampling, exclude_input_in_output=flag())
    assert text_of(excluded) == vllm.answer(None)


@row("vllm", "sampling parameters, lora_name too, in a tensor or as parameters, also as strings")
def test_vllm_adapters(vllm: Stage) -> None:
    for name in ("pirate", "parrot"):
        sampling = GREEDY | {"lora_name": name}
        expected = PROMPT + vllm.answer(name)
        assert text_of(vllm.stream(sampling_parameters=text(json.dumps(sampling)))[0]) == expected
        assert text_of(vllm.stream(sampling)[0]) == expected
        assert vllm.generate(parameters=sampling).json()["text_output"] == expected
    with pytest.raises(InferenceServerException, match="LoRA adapter 'nobody' not found in cache"):
        vllm.stream(GREEDY | {"lora_name": "nobody"})


@row("vllm", "streams of new text only; all return_ inputs")
def test_vllm_streams(vllm: Stage) -> None:
    flags = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
    # So many that they seldom come in one response, as tokens that wait for their reader do.
    num_tokens = 8 * NUM_TOKENS
    sampling = {"sampling_parameters": text(json.dumps(GREEDY | {"logprobs": 2, "max_tokens": str(num_tokens)}))}
    asked = {f"return_{name}": flag() for name in flags}
    results = vllm.stream(stream=flag(), **sampling, **asked)
    assert "".join(map(text_of, results)) == vllm.answer(None, num_tokens)
    reasons = [result.as_numpy("finish_reason")[0].decode() for result in results]
    assert reasons == ["None"] * (len(results) - 1) + ["length"]
    assert sum(result.as_numpy("num_output_tokens")[0] for result in results) == num_tokens
    for result in results:
        log_probs = json.loads(result.as_numpy("logprobs")[0])
        assert len(log_probs) == result.as_numpy("num_output_tokens")[0]
        assert all(len(token) == 2 for token in log_probs)
    sums = [result.as_numpy("cumulative_logprob")[0] for result in results]
    assert sums == sorted(sums, reverse=True)


@row("vllm", "unknown sampling parameters, images, embeddings, other protocols", "refused")
def test_vllm_refuses_by_name(vllm: Stage) -> None:
    for body, reason in (
        ({"parameters": {"top_a": 0.5}}, "top_a is not a sampling parameter"),
        ({"sampling_param_max_tokens": 5}, "sampling_param_max_tokens is not a sampling parameter"),
        ({"lora_task_id": 7}, "send lora_name"),
        ({"parameters": {"use_beam_search": True}}, "use_beam_search"),
        ({"image": ["AAAA"]}, "image: this server has no images or videos"),
        ({"stream": True, "exclude_input_in_output": False}, "When streaming, `exclude_input_in_output` = False"),
    ):
        response = vllm.generate(**body)
        assert (response.status_code, reason in response.text) == (400, True), response.text
