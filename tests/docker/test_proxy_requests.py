"""The requests that the proxy passes on or refuses, by tritonclient and by plain HTTP."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from http.client import HTTPConnection
from queue import Queue
from typing import Any

import grpc
import httpx2
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from support.certificates import Authority
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub
from tritonclient.utils import InferenceServerException

from multilora_client import Client, Tls
from multilora_engine.tritonserver import ServerProcess
from servers.local_proxy import LocalProxy
from trials.doors import infer_request

ADAPTER_BYTES = 96 << 20
GENERATE = "/v2/models/generation_unary/generate"
INFER = "/v2/models/generation_unary/infer"
STREAM = "/v2/models/generation/generate_stream"
PROMPT = {"text_input": "Hello", "max_tokens": 1}

Library = Any
"""tritonclient.grpc or tritonclient.http."""

Answers = Queue[tuple[Any, InferenceServerException | None]]


@pytest.fixture
def http(proxy: LocalProxy) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=f"http://{proxy.http_url}", timeout=60) as client:
        yield client


def address(proxy: LocalProxy, library: Library) -> str:
    return proxy.grpc_url if library is tritonclient.grpc else proxy.http_url


def tensor(library: Library, name: str, array: Any, dtype: str) -> Any:
    tensor = library.InferInput(name, array.shape, dtype)
    tensor.set_data_from_numpy(array)
    return tensor


def prompt(library: Library, max_tokens: int = 1) -> list[Any]:
    return [
        tensor(library, "text_input", np.array([[b"Hello"]], dtype=object), "BYTES"),
        tensor(library, "max_tokens", np.array([[max_tokens]], np.int32), "INT32"),
    ]


def adapter(library: Library, num_bytes: int) -> Any:
    return tensor(library, "lora_weights", np.zeros((1, 1, num_bytes // 2), np.float16), "FP16")


def ask(url: str, library: Library, *more: Any, **options: Any) -> dict[str, Any]:
    """What `generation_unary` says of a request."""
    with library.InferenceServerClient(url) as client:
        answer = client.infer("generation_unary", [*prompt(library), *more], **options)
    said: dict[str, Any] = json.loads(answer.as_numpy("text_output").item())
    return said


def http_status(proxy: LocalProxy, path: str, headers: dict[str, str]) -> int:
    """Of a POST without a body, whatever its headers say; the path goes out as it is spelt."""
    with closing(HTTPConnection(proxy.http_url, timeout=30)) as connection:
        connection.request("POST", path, headers=headers)
        return connection.getresponse().status


def start_stream(client: Any, max_tokens: int) -> Answers:
    answers: Answers = Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    client.async_stream_infer("generation", prompt(tritonclient.grpc, max_tokens))
    return answers


def next_word(answers: Answers) -> str:
    result, error = answers.get(timeout=30)
    assert error is None, error
    word: bytes = result.as_numpy("text_output").item()
    return word.decode()


@pytest.mark.parametrize("library", [tritonclient.grpc, tritonclient.http])
def test_an_inference_with_a_large_adapter_passes(proxy: LocalProxy, library: Library) -> None:
    said = ask(address(proxy, library), library, adapter(library, ADAPTER_BYTES))
    assert said["bytes"] == ADAPTER_BYTES


@pytest.mark.parametrize("library", [tritonclient.grpc, tritonclient.http])
def test_a_client_is_its_address_whatever_it_says_of_itself(proxy: LocalProxy, library: Library) -> None:
    said = ask(address(proxy, library), library, headers={"x-multilora-client": "somebody else"})
    assert said["x-multilora-client"] == f"{proxy.secret} 127.0.0.1"


@pytest.mark.parametrize("path", [GENERATE, INFER])
def test_json_says_who_the_client_is(http: httpx2.Client, proxy: LocalProxy, path: str) -> None:
    inputs = [{"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": [["Hello"]]}]
    answer = http.post(path, json=PROMPT if path == GENERATE else {"inputs": inputs}).json()
    text = answer["text_output"] if path == GENERATE else answer["outputs"][0]["data"][0]
    assert json.loads(text)["x-multilora-client"] == f"{proxy.secret} 127.0.0.1"


def test_an_empty_object_stays_json(http: httpx2.Client) -> None:
    assert "request has 0 inputs" in http.post(GENERATE, content=" { } ").json()["error"]


def test_a_client_with_ipv6_is_its_network(proxy: LocalProxy) -> None:
    said = ask(proxy.grpc_url.replace("127.0.0.1", "[::1]"), tritonclient.grpc)
    assert said["x-multilora-client"] == f"{proxy.secret} 0:0:0:0::/64"
    address = proxy.http_url.replace("127.0.0.1", "[::1]")
    said = httpx2.post(f"http://{address}{GENERATE}", json=PROMPT).json()
    assert f"{proxy.secret} 0:0:0:0::/64" in said["text_output"]


def test_words_of_a_grpc_stream_pass_one_by_one_and_cancelling_reaches_the_model(proxy: LocalProxy) -> None:
    with tritonclient.grpc.InferenceServerClient(proxy.grpc_url) as client:
        assert next_word(start_stream(client, max_tokens=0)) == "Ahoy"  # and the second one waits for the end
        client.stop_stream(cancel_requests=True)
        # The model answers one request after the other.
        answers = start_stream(client, max_tokens=1)
        assert [next_word(answers), next_word(answers)] == ["Ahoy", "Bye"]


def test_words_of_an_http_stream_pass_one_by_one_and_hanging_up_reaches_the_model(http: httpx2.Client) -> None:
    with http.stream("POST", STREAM, json=PROMPT | {"max_tokens": 0}) as response:
        assert "Ahoy" in next(response.iter_text())
    assert "Bye" in http.post(STREAM, json=PROMPT).text


def test_generate_and_infer_in_json_pass(http: httpx2.Client) -> None:
    assert json.loads(http.post(GENERATE, json=PROMPT).json()["text_output"])["bytes"] == 0
    text = {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": [["Hello"]]}
    assert http.post(INFER, json={"inputs": [text]}).json()["outputs"][0]["name"] == "text_output"


def test_a_text_full_of_brackets_and_quotes_is_no_nesting(http: httpx2.Client) -> None:
    text = '[{"\\' * 100_000
    assert http.post(GENERATE, json=PROMPT | {"text_input": text}).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/v2", "/v2/health/ready", "/v2/models/generation", "/v2/models/generation/config", "/v2/models/generation/stats"],
)
def test_health_and_metadata_pass(http: httpx2.Client, path: str) -> None:
    assert http.get(path).status_code == 200


def test_health_and_metadata_pass_over_grpc(proxy: LocalProxy) -> None:
    with tritonclient.grpc.InferenceServerClient(proxy.grpc_url) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("generation")
        assert client.get_model_metadata("generation").name == "generation"
        assert client.get_inference_statistics("generation").model_stats


def test_metrics_pass_and_nothing_else_does_beside_them(proxy: LocalProxy) -> None:
    assert "nv_inference_request_success" in httpx2.get(f"http://{proxy.metrics_url}/metrics").text
    assert httpx2.get(f"http://{proxy.metrics_url}/").status_code == 404


@pytest.mark.parametrize(
    "nest",
    [
        lambda depth: '{"text_input":' + "[" * depth + "]" * depth + "}",
        lambda depth: '{"text_input":"a","x":' + '{"":' * depth + "1" + "}" * depth + "}",
        lambda depth: "[" * depth,
        lambda depth: '["],",' * depth,
        lambda depth: "[" * 8 + "[]" * 1_000_000,
    ],
    ids=["lists", "objects", "never closed", "brackets in strings between", "a million, never closed"],
)
@pytest.mark.parametrize("path", [GENERATE, STREAM, INFER])
def test_json_too_deep_for_the_server_is_refused(
    proxied_server: ServerProcess, http: httpx2.Client, path: str, nest: Callable[[int], str]
) -> None:
    pid = proxied_server.pid
    response = http.post(path, content=nest(200_000), headers={"Content-Type": "application/json"})
    assert (response.status_code, "at most 16 levels" in response.json()["error"]) == (400, True)
    assert http.post(GENERATE, json=PROMPT).status_code == 200
    assert proxied_server.pid == pid


def test_json_as_deep_as_allowed_reaches_the_server(http: httpx2.Client) -> None:
    deep = "[" * 15 + "]" * 15
    assert "levels" not in http.post(GENERATE, content=f'{{"text_input": {deep}}}').text


@pytest.mark.parametrize("length", ["99999", "-1", "1e3", "7 7", "0x10"])
def test_json_before_tensors_is_short_or_is_looked_at(http: httpx2.Client, length: str) -> None:
    headers = {"Inference-Header-Content-Length": length}
    assert "at most 16 levels" in http.post(INFER, content="[" * 99_999, headers=headers).json()["error"]


HUGE = {"name": "embedding_bias", "shape": [1, 1 << 33], "datatype": "FP32", "data": [1.0]}
TEXT = {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["x"]}
CLASSES = {"name": "text_output", "parameters": {"classification": 1}}
HURTFUL = {
    "a shape beyond the values": json.dumps({"inputs": [TEXT, HUGE]}),
    "a shape whose size overflows": json.dumps({"inputs": [TEXT, HUGE | {"shape": [1 << 32, 1 << 32]}]}),
    "a negative shape": json.dumps({"inputs": [TEXT, HUGE | {"shape": [-1, 1]}]}),
    "a shape of no numbers": json.dumps({"inputs": [TEXT, HUGE | {"shape": ["1"]}]}),
    "a shape that stands twice": json.dumps({"inputs": [TEXT, HUGE]})[:-3] + ', "\\u0073hape": [1, 1]}]}',
    "classes": json.dumps({"inputs": [TEXT], "outputs": [CLASSES]}),
    "no JSON": '{"inputs": [NaN]}',
    "deep JSON": '{"inputs": ' + "[" * 20 + "]" * 20 + "}",
}


@pytest.mark.parametrize("text", [*HURTFUL.values()], ids=list(HURTFUL))
@pytest.mark.parametrize("has_tensors", [False, True])
def test_json_that_ends_the_server_is_refused_alone_and_before_tensors(
    http: httpx2.Client, text: str, has_tensors: bool
) -> None:
    headers = {"Inference-Header-Content-Length": str(len(text))} if has_tensors else {}
    answer = http.post(INFER, content=text.encode() + b"1234" * has_tensors, headers=headers)
    assert answer.status_code == 400
    assert http.post(GENERATE, json=PROMPT).status_code == 200


@pytest.mark.parametrize("num_values", [1, 3])
def test_json_that_has_what_its_shapes_say_passes_alone_and_before_tensors(
    http: httpx2.Client, num_values: int
) -> None:
    bias = {"name": "embedding_bias", "shape": [1, num_values], "datatype": "FP32", "data": [1.0] * num_values}
    text = json.dumps({"id": 'a":"b', "inputs": [TEXT, bias], "outputs": [{"name": "text_output"}]})
    assert http.post(INFER, content=text).status_code == 200
    raw = {**TEXT, "parameters": {"binary_data_size": 5}}
    del raw["data"]
    text = json.dumps({"inputs": [raw, bias]})
    headers = {"Inference-Header-Content-Length": str(len(text))}
    assert http.post(INFER, content=text.encode() + b"\1\0\0\0x", headers=headers).status_code == 200


def test_a_weight_of_an_encoding_that_no_double_holds_does_not_reach_the_server(http: httpx2.Client) -> None:
    assert http.post(GENERATE, json=PROMPT, headers={"Accept-Encoding": "gzip;q=1e999999"}).status_code == 200


def test_errors_in_a_form_that_ends_the_server_cannot_be_asked_for(proxy: LocalProxy, http: httpx2.Client) -> None:
    asked = [infer_request(model, text_input=[["Hello"]], max_tokens=[[1]]) for model in ("nobody", "generation")]
    with grpc.insecure_channel(proxy.grpc_url) as channel:
        stub, metadata = GRPCInferenceServiceStub(channel), [("triton_grpc_error", "true")]
        answers = [*stub.ModelStreamInfer(iter(asked), metadata=metadata, timeout=30)]
    # The stream went on after the error: the server was not told of the header.
    assert {bool(answer.error_message) for answer in answers} == {True, False}
    assert http.post(GENERATE, json=PROMPT).status_code == 200


@pytest.mark.parametrize("path", [GENERATE, INFER])
def test_compressed_json_is_refused(http: httpx2.Client, path: str) -> None:
    body = gzip.compress(json.dumps(PROMPT).encode())
    assert http.post(path, content=body, headers={"Content-Encoding": "gzip"}).status_code == 415


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_grpc_messages_are_refused_before_they_are_inflated(proxy: LocalProxy, algorithm: str) -> None:
    zeros = adapter(tritonclient.grpc, ADAPTER_BYTES)
    with pytest.raises(InferenceServerException, match="compressed messages are not taken") as refused:
        ask(proxy.grpc_url, tritonclient.grpc, zeros, compression_algorithm=algorithm)
    assert refused.value.status() == "StatusCode.UNIMPLEMENTED"


def test_a_body_too_large_is_refused(proxy: LocalProxy, http: httpx2.Client) -> None:
    assert http.post(GENERATE, json=PROMPT | {"text_input": "a" * (2 << 20)}).status_code == 413
    with pytest.raises(InferenceServerException, match="256 MiB") as refused:
        ask(proxy.grpc_url, tritonclient.grpc, adapter(tritonclient.grpc, 257 << 20))
    assert refused.value.status() == "StatusCode.RESOURCE_EXHAUSTED"


@pytest.mark.parametrize(("header", "length"), [("2", 257 << 20), ("", 3 << 20)], ids=["tensors", "JSON"])
def test_a_body_too_large_is_refused_by_its_announcement(proxy: LocalProxy, header: str, length: int) -> None:
    headers = {"Inference-Header-Content-Length": header, "Content-Length": str(length)}
    assert http_status(proxy, INFER, headers) == 413


def test_a_head_too_large_is_refused(proxy: LocalProxy) -> None:
    assert http_status(proxy, GENERATE, {f"X-{i}": "a" * 8000 for i in range(5)}) == 400


def test_json_that_the_check_cannot_see_never_passes(open_proxy: Callable[..., LocalProxy]) -> None:
    blind = open_proxy(changes={"client_body_buffer_size 2m": "client_body_buffer_size 1k"})
    text = json.dumps(PROMPT | {"text_input": "a" * 10_000})
    assert httpx2.post(f"http://{blind.http_url}{GENERATE}", content=text).status_code == 500


def test_tensors_over_http_say_their_length(http: httpx2.Client) -> None:
    headers = {"Inference-Header-Content-Length": "2"}
    assert http.post(INFER, content=iter([b"{}", b"tensor"]), headers=headers).status_code == 411


@pytest.mark.parametrize(
    "path",
    [
        "/v2/systemsharedmemory/status",
        "/v2/repository/index",
        "/v2/models/generation/trace/setting",
        "/v2/logging",
        "/v2/models/generation_unary/generate/../infer",
        "/v2/models/generation_unary/%67enerate",
        "//v2/models/generation_unary/generate",
        "/v2/health/ready?x",
    ],
)
def test_paths_that_clients_do_not_need_or_spell_strangely_are_refused(proxy: LocalProxy, path: str) -> None:
    assert http_status(proxy, path, {}) == 404


def test_methods_that_clients_do_not_need_are_refused(proxy: LocalProxy) -> None:
    with tritonclient.grpc.InferenceServerClient(proxy.grpc_url) as client:
        for call in (client.get_system_shared_memory_status, client.get_model_repository_index):
            with pytest.raises(InferenceServerException, match="no such method"):
                call()


def test_requests_at_once_from_an_address_are_bounded(open_proxy: Callable[..., LocalProxy]) -> None:
    narrow = open_proxy(changes={"limit_conn requests 512": "limit_conn requests 1"})
    with tritonclient.grpc.InferenceServerClient(narrow.grpc_url) as client:
        assert next_word(start_stream(client, max_tokens=0)) == "Ahoy"
        with pytest.raises(InferenceServerException, match="too many requests at once") as refused:
            client.is_server_live()
        assert refused.value.status() == "StatusCode.UNAVAILABLE"
        with httpx2.Client(base_url=f"http://{narrow.http_url}") as http:
            assert http.post(GENERATE, json=PROMPT).status_code == 429
        client.stop_stream(cancel_requests=True)


def test_tls_ends_at_the_proxy(open_proxy: Callable[..., LocalProxy], tmp_path_factory: pytest.TempPathFactory) -> None:
    authority = Authority(tmp_path_factory.mktemp("tls"))
    identity = authority.sign("proxy")
    secured = open_proxy(certificate=identity.certificate, key=identity.key)
    for url in (f"grpcs://{secured.grpc_url}", f"https://{secured.http_url}"):
        with Client(url, tls=Tls(ca=authority.ca)) as client:
            assert '"bytes": 0' in client.generate("Who are you?", max_tokens=1).text
    with pytest.raises(httpx2.HTTPError):
        httpx2.get(f"http://{secured.http_url}/v2", timeout=20).raise_for_status()
