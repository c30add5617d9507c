"""A server whose streams have several tokens a response: the same answers in fewer responses, at every door."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.wire import stream, stream_texts, tensors, text_of

from multilora_engine.tritonserver import ServerOptions, ServerProcess

REPOSITORY = Path(__file__).parents[2]
PROMPT = "Les étoiles brillent 🌟, 東京の"
NUM_TOKENS, INTERVAL = 14, 4


@pytest.fixture(scope="module")
def sparing_server(default_model_dir: Path) -> Iterator[ServerProcess]:
    options = ServerOptions(
        model=default_model_dir,
        model_repository=REPOSITORY / "model_repository",
        overrides={"stream_interval": str(INTERVAL), "kv_cache_memory_bytes": "64MiB", "max_num_seqs": "4"},
        http_port=0,
        grpc_port=0,
        metrics_port=0,
    )
    with ServerProcess(options) as server:
        server.wait_ready()
        yield server


@pytest.mark.parametrize(("model", "streams"), [("generation", "streaming"), ("ensemble", "stream")])
def test_a_stream_of_fewer_responses_is_the_same_answer(
    server: ServerProcess, sparing_server: ServerProcess, model: str, streams: str
) -> None:
    asked = tensors(text_input=PROMPT, max_tokens=NUM_TOKENS, end_id=-1, **{streams: True})
    with stream(sparing_server.grpc_url, model, asked) as responses:
        results = list(responses)
    assert "".join(map(text_of, results)) == "".join(stream_texts(server.grpc_url, model, asked))
    first, *others = [int(result.as_numpy("num_output_tokens").item()) for result in results]
    assert first < INTERVAL
    assert all(count >= INTERVAL for count in others[:-1])
    assert first + sum(others) == NUM_TOKENS
