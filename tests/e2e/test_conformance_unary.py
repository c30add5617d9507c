"""The models of upstream's names on a server for clients that do not stream."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.conformance import PROMPT, row
from support.stock_clients import stream, text_request, unary
from support.wire import HttpClient, infer
from tritonclient.utils import InferenceServerException

from multilora_engine.tritonserver import ServerProcess
from multilora_engine.tritonserver.upstream_models import UpstreamModels
from servers.tiny_server import tiny_server


@pytest.fixture(scope="module")
def unary_server() -> Iterator[ServerProcess]:
    with tiny_server(UpstreamModels.UNARY) as (server, _):
        yield server


@row("ensemble", "decoupled exactly where tensorrt_llm is: else unary gRPC and HTTP infer reach it")
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_text_models_that_are_not_decoupled(unary_server: ServerProcess, model: str) -> None:
    request = text_request(PROMPT, 3, False)
    whole = unary(unary_server.grpc_url, model, request).as_numpy("text_output")
    assert whole.shape == (1,)
    assert whole[0].decode().startswith(PROMPT)
    with HttpClient(unary_server.http_url) as client:
        assert infer(client, model, request).as_numpy("text_output").tolist() == whole.tolist()
    (streamed,) = stream(unary_server.grpc_url, model, request)
    assert streamed.as_numpy("text_output").tolist() == whole.tolist()
    with pytest.raises(InferenceServerException, match=r"\[INVALID_ARG\] this model sends one response"):
        unary(unary_server.grpc_url, model, text_request(PROMPT, 3, True))
