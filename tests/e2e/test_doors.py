"""One answer, whichever door it is asked at: both protocols, streamed or whole, direct or through an ensemble."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx2
import jsonschema
import numpy as np
import pytest
from support.stock_clients import stream as whole_stream
from support.wire import GrpcClient, HttpClient, infer, stream, stream_texts, tensors, text_of

from multilora_client import Adapter
from multilora_engine.tritonserver import ServerProcess

PROMPTS = ["The capital of France is", "Les étoiles brillent 🌟, 東京の", "Q: 2 + 2?\nA:"]


def direct(prompt: str, task: int | None, **extra: object) -> dict[str, np.ndarray]:
    id_ = {} if task is None else {"lora_task_id": task}
    return tensors(text_input=prompt, max_tokens=12, exclude_input_in_output=True, **id_, **extra)


@pytest.fixture
def uploaded(samples: dict[str, Adapter]) -> list[int | None]:
    """Task ids of the sample adapters, which the server has; None is the base model."""
    return [None, *(adapter.lora_task_id for adapter in samples.values())]


@pytest.mark.parametrize(("prompt", "adapter"), [*((prompt, None) for prompt in PROMPTS), (PROMPTS[1], "pirate")])
def test_every_door_gives_the_same_text(
    server: ServerProcess,
    samples: dict[str, Adapter],
    triton_grpc: GrpcClient,
    triton_http: HttpClient,
    prompt: str,
    adapter: str | None,
) -> None:
    task = None if adapter is None else samples[adapter].lora_task_id
    whole, streamed = direct(prompt, task), direct(prompt, task, streaming=True)
    texts = {
        "generation_unary grpc": text_of(infer(triton_grpc, "generation_unary", whole)),
        "generation_unary http": text_of(infer(triton_http, "generation_unary", whole)),
        "ensemble_unary grpc": text_of(infer(triton_grpc, "ensemble_unary", whole)),
        "ensemble_unary http": text_of(infer(triton_http, "ensemble_unary", whole)),
        "generation": "".join(stream_texts(server.grpc_url, "generation", streamed)),
        "generation, not streaming": "".join(stream_texts(server.grpc_url, "generation", whole)),
        "ensemble": "".join(stream_texts(server.grpc_url, "ensemble", direct(prompt, task, stream=True))),
        "generate": generate(server, "generation_unary", prompt, task),
        "generate through ensemble": generate(server, "ensemble_unary", prompt, task),
        "generate_stream": "".join(generate_stream(server, prompt, task)),
    }
    assert len(set(texts.values())) == 1, texts
    assert len(texts["generation"]) > 5


def body(prompt: str, task: int | None) -> dict[str, object]:
    values: dict[str, object] = {"text_input": prompt, "max_tokens": 12, "exclude_input_in_output": True}
    return values if task is None else values | {"lora_task_id": task}


def generate(server: ServerProcess, model: str, prompt: str, task: int | None) -> str:
    response = httpx2.post(f"http://{server.http_url}/v2/models/{model}/generate", json=body(prompt, task), timeout=300)
    assert response.status_code == 200, response.text
    return str(response.json()["text_output"])


def generate_stream(server: ServerProcess, prompt: str, task: int | None) -> list[str]:
    response = httpx2.post(
        f"http://{server.http_url}/v2/models/generation/generate_stream",
        json=body(prompt, task) | {"streaming": True},
        timeout=300,
    )
    assert response.status_code == 200, response.text
    events = [line.removeprefix("data: ") for line in response.content.decode().splitlines() if line]
    return [json.loads(event)["text_output"] for event in events]


def test_every_streamed_piece_is_whole_characters(server: ServerProcess, samples: dict[str, Adapter]) -> None:
    task = samples["emoji"].lora_task_id
    pieces = stream_texts(server.grpc_url, "generation", chat("How are you today?", task, streaming=True))
    text = "".join(pieces)
    assert any(len(character.encode()) > 2 for character in text), f"no character of several tokens in {text!r}"
    assert "�" not in text[:-1], "a character was cut (the token limit may cut the last one)"


def chat(question: str, task: int | None, **extra: object) -> dict[str, np.ndarray]:
    messages = json.dumps([{"role": "user", "content": question}])
    id_ = {} if task is None else {"lora_task_id": task}
    return tensors(messages=messages, max_tokens=40, exclude_input_in_output=True, **id_, **extra)


def test_requests_of_all_adapters_in_one_batch_get_what_they_get_alone(
    server: ServerProcess, uploaded: list[int | None]
) -> None:
    questions = ["Who are you?", "What is the sea?"]
    cases = [(question, task) for question in questions for task in uploaded]

    def ask(case: tuple[str, int | None]) -> str:
        with GrpcClient(server.grpc_url) as client:
            return text_of(infer(client, "generation_unary", chat(*case)))

    alone = [ask(case) for case in cases]
    with ThreadPoolExecutor(len(cases)) as pool:
        together = list(pool.map(ask, cases))
    assert together == alone
    assert len(set(alone)) == len(cases), "the adapters change nothing"


def test_prompt_and_answer_come_back_together_unless_the_input_is_excluded(triton_grpc: GrpcClient) -> None:
    request = tensors(text_input=PROMPTS[0], max_tokens=5)
    with_input = infer(triton_grpc, "generation_unary", request)
    without = infer(triton_grpc, "generation_unary", request | tensors(exclude_input_in_output=True))
    assert text_of(with_input) == PROMPTS[0] + text_of(without)
    num_input = int(without.as_numpy("num_input_tokens").item())
    assert int(with_input.as_numpy("sequence_length").item()) == num_input + 5
    assert with_input.as_numpy("output_ids").shape == (1, 1, num_input + 5)
    assert (with_input.as_numpy("output_ids")[0, 0, num_input:] == without.as_numpy("output_ids")[0, 0]).all()


def test_ids_in_give_the_same_ids_out_as_text_in(triton_grpc: GrpcClient) -> None:
    by_text = infer(triton_grpc, "generation_unary", tensors(text_input=PROMPTS[1], max_tokens=6))
    token_ids = by_text.as_numpy("output_ids")[0, 0, :-6].tolist()
    request = tensors(input_ids=token_ids, input_lengths=len(token_ids), request_output_len=6, streaming=False)
    by_ids = infer(triton_grpc, "generation_unary", request)
    assert by_ids.as_numpy("output_ids").tolist() == by_text.as_numpy("output_ids").tolist()


def test_rows_of_one_request_are_answered_each_for_itself(triton_grpc: GrpcClient, uploaded: list[int | None]) -> None:
    rows = [direct(prompt, uploaded[1]) for prompt in PROMPTS]
    batch = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    result = infer(triton_grpc, "generation_unary", batch)
    expected = [text_of(infer(triton_grpc, "generation_unary", row)) for row in rows]
    assert [text.decode() for text in result.as_numpy("text_output").flatten()] == expected
    assert result.as_numpy("batch_index").flatten().tolist() == [0, 1, 2]


def test_a_seed_repeats_a_sampled_answer_and_another_changes_it(triton_grpc: GrpcClient) -> None:
    def draw(seed: int) -> str:
        request = tensors(text_input=PROMPTS[0], max_tokens=16, temperature=1.5, runtime_top_k=50, seed=seed)
        return text_of(infer(triton_grpc, "generation_unary", request))

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_a_stop_word_never_shows(server: ServerProcess, triton_grpc: GrpcClient) -> None:
    request = direct(PROMPTS[0], None)
    text = text_of(infer(triton_grpc, "generation_unary", request))
    word = text[8:14]
    stopped = request | tensors(stop_words=[word])
    assert text_of(infer(triton_grpc, "ensemble_unary", stopped)) == text[: text.index(word)]
    streamed = stream_texts(server.grpc_url, "generation", stopped | tensors(streaming=True))
    assert "".join(streamed) == text[: text.index(word)]


SPECIAL = "<|im_start|>"


@pytest.mark.parametrize(
    ("stop_word", "length"), [(SPECIAL, 1), (SPECIAL * 3, 3), (f"{SPECIAL}a", 12), ("im_start", 12)]
)
def test_a_stop_word_that_spells_special_tokens_ends_the_answer_at_every_door(
    server: ServerProcess, triton_grpc: GrpcClient, triton_http: HttpClient, stop_word: str, length: int
) -> None:
    """The model writes nothing but the special token."""
    request = direct(PROMPTS[0], None, stop_words=[stop_word], embedding_bias_words=[SPECIAL])
    request |= tensors(embedding_bias_weights=[200.0], return_log_probs=True)
    unary = [
        (triton_grpc, "generation_unary", {}),
        (triton_http, "generation_unary", {"include_stop_str_in_output": np.array([[True]])}),
        (triton_http, "ensemble_unary", {}),
        (triton_grpc, "generation_unary", tensors(beam_width=2)),
        (triton_grpc, "generation_unary", tensors(num_return_sequences=2)),
    ]
    results = [(door, infer(client, door, request | options)) for client, door, options in unary]
    for door, option in (("generation", "streaming"), ("ensemble", "stream"), ("tensorrt_llm_bls", "stream")):
        results.append((door, whole_stream(server.grpc_url, door, request | tensors(**{option: True}))[-1]))
    for door, result in results:
        assert result.as_numpy("finish_reason").flatten()[0] == (b"stop" if length < 12 else b"length"), door
        assert result.as_numpy("num_output_tokens_so_far").flatten()[0] == length, door
        assert not result.as_numpy("text_output").flatten()[0], door


def test_a_bad_word_that_spells_special_tokens_is_never_written(triton_grpc: GrpcClient) -> None:
    request = direct(PROMPTS[0], None, embedding_bias_words=[SPECIAL], embedding_bias_weights=[200.0])
    free = text_of(infer(triton_grpc, "generation_unary", request))
    for door in ("generation_unary", "ensemble_unary"):
        banned = infer(triton_grpc, door, request | tensors(bad_words=[SPECIAL]))
        assert (free, bool(text_of(banned))) == ("", True)
        twice = infer(triton_grpc, door, request | tensors(bad_words=[SPECIAL * 2]))
        assert len(text_of(twice)) > 0


def test_several_sequences_are_beams_of_the_unary_doors_and_responses_of_the_streaming_ones(
    server: ServerProcess, triton_grpc: GrpcClient
) -> None:
    request = direct(PROMPTS[0], None, temperature=1.5, seed=3, num_return_sequences=3)
    unary = infer(triton_grpc, "generation_unary", request).as_numpy("text_output")
    assert unary.shape == (1, 3)
    assert len(set(unary[0])) == 3
    assert infer(triton_grpc, "ensemble_unary", request).as_numpy("text_output").tolist() == unary[0].tolist()
    for model in ("generation", "ensemble"):
        with stream(server.grpc_url, model, request) as responses:
            texts = {int(r.as_numpy("sequence_index").item()): r.as_numpy("text_output").item() for r in responses}
        assert [texts[i] for i in range(3)] == unary[0].tolist()


def test_beams_come_in_one_response_of_every_door_best_first(server: ServerProcess, triton_grpc: GrpcClient) -> None:
    request = direct(PROMPTS[0], None, beam_width=4, num_return_sequences=3, return_log_probs=True)
    results = [infer(triton_grpc, model, request) for model in ("generation_unary", "ensemble_unary")]
    for model in ("generation", "ensemble"):
        with stream(server.grpc_url, model, request) as responses:
            results += list(responses)
    assert len(results) == 4
    texts = [result.as_numpy("text_output") for result in results]
    assert [array.shape for array in texts] == [(1, 3), (3,)] * 2
    assert len({tuple(array.flatten()) for array in texts}) == 1
    assert len(set(texts[1])) == 3
    for result in results:
        sums = result.as_numpy("cum_log_probs")
        assert sums.shape == (1, 3)
        assert sums[0].tolist() == sorted(sums[0].tolist(), reverse=True)
        np.testing.assert_allclose(result.as_numpy("output_log_probs").sum(axis=2), sums, rtol=1e-4)


def test_a_guided_answer_parses_at_every_door(server: ServerProcess, triton_grpc: GrpcClient) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}, "ok": {"type": "boolean"}}}
    schema |= {"required": ["n", "ok"], "additionalProperties": False}
    guide = {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": json.dumps(schema)}
    request = direct(PROMPTS[2], None) | tensors(**guide, max_tokens=200)
    texts = [text_of(infer(triton_grpc, model, request)) for model in ("generation_unary", "ensemble_unary")]
    texts += ["".join(stream_texts(server.grpc_url, model, request)) for model in ("generation", "ensemble")]
    assert len(set(texts)) == 1
    jsonschema.validate(json.loads(texts[0]), schema)
