"""The mistake in a request is told to its sender, with the right code, and to no other client."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx2
import numpy as np
import pytest
from support.wire import GrpcClient, HttpClient, error_of, infer, stream_texts, tensors, text_of
from tritonclient.utils import InferenceServerException

from multilora_engine.tritonserver import ServerProcess

GOOD = tensors(text_input="Hello", max_tokens=3)
NOT_UTF8 = np.array([[b"\xff\xfe abc"]], np.object_)

BAD_REQUESTS = {
    "empty text": (GOOD | tensors(text_input=""), "empty prompt"),
    "no prompt": (tensors(max_tokens=3), "exactly one of text_input, messages, input_ids; it has none"),
    "two prompts": (GOOD | tensors(input_ids=[1, 2]), "it has text_input and input_ids"),
    "text that is not UTF-8": (GOOD | {"text_input": NOT_UTF8}, "text_input is not valid UTF-8"),
    "max_tokens below 0": (GOOD | tensors(max_tokens=-1), "max_tokens is -1, expected a number >= 0"),
    "max_tokens missing": (tensors(text_input="Hello"), "max_tokens is missing"),
    "max_tokens twice": (GOOD | tensors(request_output_len=9), "contradict each other"),
    "prompt too long": (tensors(input_ids=[5] * 8192, max_tokens=1), "the prompt has 8192 tokens and max_model_len"),
    "id beyond the vocabulary": (tensors(input_ids=[1, 49152], max_tokens=1), "input_ids holds 49152 at position 1"),
    "negative id": (tensors(input_ids=[-1], max_tokens=1), "input_ids holds -1 at position 0"),
    "temperature negative": (GOOD | tensors(temperature=-1.0), "temperature is -1"),
    "temperature NaN": (GOOD | tensors(temperature=np.nan), "temperature is nan"),
    "top_p above one": (GOOD | tensors(runtime_top_p=1.5), "runtime_top_p is 1.5"),
    "top_k negative": (GOOD | tensors(runtime_top_k=-1), "runtime_top_k is -1"),
    "two values where one belongs": (GOOD | tensors(max_tokens=[3, 4]), "max_tokens"),
    "messages that are no JSON": (tensors(messages="{oops", max_tokens=3), "messages"),
    "messages without roles": (tensors(messages='[{"content": "x"}]', max_tokens=3), "role"),
    "streaming at the unary door": (GOOD | tensors(streaming=True), "call the model generation"),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_bad_request_gets_its_reason_over_grpc_and_http(
    triton_grpc: GrpcClient, triton_http: HttpClient, case: str
) -> None:
    request, message = BAD_REQUESTS[case]
    for client, status in ((triton_grpc, "StatusCode.INVALID_ARGUMENT"), (triton_http, "400")):
        with pytest.raises(InferenceServerException) as caught:
            infer(client, "generation_unary", request, request_id="r7")
        assert message in str(caught.value.message())
        assert error_of(caught.value)[0] == status


LOST_INPUTS = {
    "a misspelt lora_task_id": ("generation_unary", {"lora_taskid": 101}, "lora_taskid is a parameter"),
    "the same in an ensemble": ("ensemble_unary", {"lora_taskid": 101}, "lora_taskid is a parameter"),
    "the same in a stream": ("generation", {"Lora_Id": 101}, "lora_id is a parameter"),
    "another server's name": ("ensemble", {"parameters": {"adapter_id": "pirate"}}, "adapter_id is a parameter"),
    "the ensembles' name": ("generation_unary", {"top_k": 2}, "which has it as runtime_top_k"),
    "an adapter as the model": ("generation_unary", {"model": "pirate"}, "model is 'pirate', no model of this server"),
    "an adapter as the model of an ensemble": (
        "ensemble_unary",
        {"model": "pirate"},
        "model is 'pirate', no model of this server",
    ),
    "a name that no ensemble has": ("ensemble_unary", {"runtime_top_p": 0.5}, "which has it as top_p"),
}


@pytest.mark.parametrize("case", LOST_INPUTS)
def test_an_input_that_http_generate_does_not_know_is_not_lost(server: ServerProcess, case: str) -> None:
    model, more, message = LOST_INPUTS[case]
    body = {"text_input": "Hello", "max_tokens": 3, "stream": False, **more}
    response = httpx2.post(f"http://{server.http_url}/v2/models/{model}/generate", json=body, timeout=300)
    assert response.status_code == 400
    assert message in response.json()["error"]


def test_the_model_of_the_address_may_be_named_in_the_body_too(server: ServerProcess) -> None:
    for model in ("generation_unary", "ensemble_unary"):
        body = {"text_input": "Hello", "max_tokens": 3, "model": model}
        url = f"http://{server.http_url}/v2/models/{model}/generate"
        assert httpx2.post(url, json=body, timeout=300).status_code == 200


def test_a_parameter_of_a_request_chooses_no_adapter(triton_grpc: GrpcClient, triton_http: HttpClient) -> None:
    for client in (triton_grpc, triton_http):
        with pytest.raises(InferenceServerException, match="send the input lora_task_id or lora_name"):
            infer(client, "generation_unary", GOOD, parameters={"lora_task_id": 101})


def test_what_this_server_does_not_do_is_unsupported_not_ignored(triton_grpc: GrpcClient) -> None:
    with pytest.raises(InferenceServerException, match="beam_width 2 together with min_p") as caught:
        infer(triton_grpc, "generation_unary", GOOD | tensors(beam_width=2, min_p=0.5))
    assert error_of(caught.value)[0] == "StatusCode.UNIMPLEMENTED"


def test_stream_errors_start_with_their_code_and_end_with_the_request_id(server: ServerProcess) -> None:
    with pytest.raises(InferenceServerException) as caught:
        stream_texts(server.grpc_url, "generation", GOOD | tensors(max_tokens=-1), request_id="r8")
    message = str(caught.value.message())
    assert message.startswith("[INVALID_ARG] max_tokens is -1")
    assert message.endswith("(request r8)")


def test_errors_do_not_disturb_the_good_requests_between_them(server: ServerProcess, triton_grpc: GrpcClient) -> None:
    expected = text_of(infer(triton_grpc, "generation_unary", GOOD))
    bad = [request for request, _ in BAD_REQUESTS.values()]

    def ask(request: dict[str, np.ndarray]) -> str:
        with GrpcClient(server.grpc_url) as client:
            try:
                return text_of(infer(client, "generation_unary", request))
            except InferenceServerException:
                return "refused"

    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(ask, [request for pair in zip(bad, [GOOD] * len(bad), strict=True) for request in pair])
        )
    assert answers == ["refused", expected] * len(bad)


def test_a_thousand_tiny_requests_in_a_row_are_all_answered(server: ServerProcess) -> None:
    request = tensors(input_ids=[7], max_tokens=1, exclude_input_in_output=True)

    def ask_many(number: int) -> int:
        with GrpcClient(server.grpc_url) as client:
            results = [infer(client, "generation_unary", request) for _ in range(number)]
        return len({result.as_numpy("output_ids").tobytes() for result in results})

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask_many, [125] * 8)) == [1] * 8
