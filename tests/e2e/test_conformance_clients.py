"""The behaviour that clients of TensorRT-LLM's Triton models rely on, each with requests as that client sends them."""

from __future__ import annotations

import itertools
import json
import queue
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
import tritonclient.grpc as triton
from support.conformance import IDS, NUM_TOKENS, PROMPT, row
from support.stock_clients import (
    Session,
    Tensors,
    flag,
    inputs_of,
    integer,
    names_of,
    openai_request,
    real,
    seed_of,
    session,
    stop_request,
    stream,
    streamed_tokens,
    text_of,
    text_request,
    token_request,
    unary,
    whole_tokens,
)
from support.wire import adapter_tensors
from tritonclient.utils import InferenceServerException

from multilora_client import Adapter
from multilora_client.convert import convert_peft

MAX_NUM_SEQS = 8
PIRATE = Path(__file__).parents[2] / "adapters" / "pirate"

fresh_ids = itertools.count(500_000)


@pytest.fixture
def triplet() -> Tensors:
    """The three tensors of an adapter that the server does not have."""
    return adapter_tensors(Adapter(next(fresh_ids), convert_peft(PIRATE, "float16")))


def only_id(adapter: Tensors) -> Tensors:
    return {"lora_task_id": adapter["lora_task_id"]}


# The token client.


@row("token client", "not streaming: one response of prompt and answer; sequence_length counts the prompt")
def test_a_whole_answer_starts_with_the_prompt(url: str, greedy: list[int]) -> None:
    result = unary(url, "generation_unary", token_request(IDS, NUM_TOKENS, False))
    assert result.as_numpy("sequence_length").tolist() == [[len(IDS) + NUM_TOKENS]]
    assert result.as_numpy("output_ids").tolist() == [[IDS + greedy]]


@row("token client", "exclude_input_in_output overrides the model's parameter")
def test_the_input_can_be_left_out(url: str, greedy: list[int]) -> None:
    for model, ask in (("generation_unary", unary), ("tensorrt_llm", lambda *asked: stream(*asked)[0])):
        result = ask(url, model, token_request(IDS, NUM_TOKENS, False, exclude_input_in_output=flag()))
        assert result.as_numpy("output_ids").tolist() == [[greedy]]
        assert result.as_numpy("sequence_length").tolist() == [[NUM_TOKENS]]


@row("token client", "streaming: responses of new tokens only, [1, 1, n], up to the end of the stream")
def test_a_stream_has_new_tokens_only(url: str, greedy: list[int]) -> None:
    results = stream(url, "tensorrt_llm", token_request(IDS, NUM_TOKENS, True))
    for result in results:
        _, _, num_tokens = shape = result.as_numpy("output_ids").shape
        assert shape == (1, 1, num_tokens)
        assert result.as_numpy("sequence_length").tolist() == [[num_tokens]]
    assert streamed_tokens(results) == greedy


@row("token client", "its defaults are greedy: top_k 1, top_p 0 (unset), temperature 1; top_k 0 is no restriction")
def test_the_clients_defaults_are_greedy(url: str, greedy: list[int]) -> None:
    assert greedy == whole_tokens(unary(url, "generation_unary", {**token_request(IDS, NUM_TOKENS, False)}), len(IDS))
    free = {"runtime_top_k": integer(0), "temperature": real(2.0)}
    assert whole_tokens(unary(url, "generation_unary", token_request(IDS, NUM_TOKENS, False, **free)), 5) != greedy
    negative = token_request(IDS, NUM_TOKENS, False, runtime_top_p=real(-1.0))
    assert whole_tokens(unary(url, "generation_unary", negative), len(IDS)) == greedy


@row("token client", "end_id ends the answer, -1 never does")
def test_end_ids(url: str, greedy: list[int]) -> None:
    ended = streamed_tokens(stream(url, "tensorrt_llm", token_request(IDS, 40, True, end_id=greedy[2])))
    assert ended == greedy[: len(ended)]
    assert len(ended) <= 3
    endless = stream(url, "tensorrt_llm", token_request(IDS, 40, True, end_id=-1))
    assert len(streamed_tokens(endless)) == 40


@row("token client", "num_return_sequences: a response a sequence, with sequence_index")
def test_sequences(url: str) -> None:
    options = {"num_return_sequences": integer(3), "runtime_top_k": integer(50), "seed": seed_of(3)}
    results = stream(url, "tensorrt_llm", token_request(IDS, NUM_TOKENS, False, **options))
    assert all(result.as_numpy("sequence_index").shape == (1, 1) for result in results)
    answers = {result.as_numpy("sequence_index")[0][0]: whole_tokens(result, len(IDS)) for result in results}
    assert sorted(answers) == [0, 1, 2]
    assert len(set(map(tuple, answers.values()))) == 3


@row("token client", "requests of several rows: batch_index tells which of them a response of a stream answers")
def test_batches(url: str, greedy: list[int]) -> None:
    rows = [token_request(ids, NUM_TOKENS, True) for ids in (IDS, IDS[1:] + IDS[:1])]
    batch = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    results = stream(url, "tensorrt_llm", batch)
    first = [result for result in results if result.as_numpy("batch_index").tolist() == [[0]]]
    second = [result for result in results if result.as_numpy("batch_index").tolist() == [[1]]]
    assert len(first) + len(second) == len(results)
    assert (streamed_tokens(first), len(streamed_tokens(second))) == (greedy, NUM_TOKENS)


@row("text client", "several prompts as one request: a response for each, with batch_index")
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_batches_of_texts(url: str, model: str) -> None:
    prompts = [PROMPT, "Bees make"]
    rows = [text_request(prompt, 3, False) for prompt in prompts]
    batch = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    results = stream(url, model, batch, ["text_output", "batch_index"])
    texts = {result.as_numpy("batch_index")[0][0]: text_of([result]) for result in results}
    assert [texts[i][: len(prompt)] for i, prompt in enumerate(prompts)] == prompts


@row("token client", "the response carries exactly the requested outputs")
@pytest.mark.parametrize("streaming", [True, False])
def test_requested_outputs(url: str, streaming: bool) -> None:
    names = ["output_ids", "sequence_length", "cum_log_probs"]
    request = token_request(IDS, 3, streaming, return_log_probs=flag())
    for result in stream(url, "tensorrt_llm", request, names):
        assert names_of(result) == set(names)
    assert names_of(unary(url, "generation_unary", token_request(IDS, 3, False), outputs=names[:2])) == set(names[:2])


@row("token client", "output_ids is the first output of every response, in any order of requested outputs")
@pytest.mark.parametrize("names", [[], ["sequence_length", "output_ids"], ["output_ids", "cum_log_probs"]])
def test_the_first_output(url: str, names: list[str]) -> None:
    for streaming, options in ((True, {"return_log_probs": flag()}), (False, {"return_perf_metrics": flag()})):
        results = stream(url, "tensorrt_llm", token_request(IDS, 3, streaming, **options), names)
        assert {result.get_response().outputs[0].name for result in results} == {"output_ids"}
    result = unary(url, "generation_unary", token_request(IDS, 3, False), outputs=names)
    assert list(result.get_response().outputs[0].shape) == [1, 1, len(IDS) + 3]


@row("token client", "a stop request gets an empty response, and its original ends with fewer tokens")
def test_a_stop_request(url: str) -> None:
    with session(url, "tensorrt_llm") as opened:
        opened.send(token_request(IDS, 2000, True, end_id=-1), "ab12")
        first = opened.next()
        opened.send(stop_request(), "ab12")
        results = [first, *opened.finish()]
    assert sum(not names_of(result) for result in results) == 1
    tokens = streamed_tokens([result for result in results if names_of(result)])
    assert 0 < len(tokens) < 2000


@row("token client", "a stop request for an unknown id is answered, too; one without an id is an error")
def test_stop_requests_that_stop_nothing(url: str) -> None:
    with session(url, "tensorrt_llm") as opened:
        opened.send(stop_request(), "nobody")
        (result,) = opened.finish()
    assert names_of(result) == set()
    with pytest.raises(InferenceServerException, match="stop needs the request id"):
        stream(url, "tensorrt_llm", stop_request())


def fill_the_batch(opened: Session, request: Tensors) -> None:
    """As many endless requests on one stream as the server runs at once, each of which has begun to answer."""
    for i in range(MAX_NUM_SEQS):
        opened.send(request, f"endless-{i}")
    seen: set[str] = set()
    while len(seen) < MAX_NUM_SEQS:
        seen.add(opened.next().get_response().id)


@row("token client", "cancelling a stream ends its requests at once")
def test_cancelled_streams(url: str, greedy: list[int]) -> None:
    with session(url, "tensorrt_llm") as opened:
        fill_the_batch(opened, token_request(IDS, 4000, True, end_id=-1))
        opened.client.stop_stream(cancel_requests=True)
    assert streamed_tokens(stream(url, "tensorrt_llm", token_request(IDS, NUM_TOKENS, True))) == greedy


@row("token client", "cancelling a call ends it with the status CANCELLED")
def test_cancelled_calls(url: str, greedy: list[int]) -> None:
    ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    request = inputs_of(token_request(IDS, 4000, False, end_id=-1))
    with triton.InferenceServerClient(url) as client:
        calls = [
            client.async_infer("generation_unary", request, lambda result, error: ended.put(error))
            for _ in range(MAX_NUM_SEQS)
        ]
        for call in calls:
            call.cancel()
        errors = [ended.get(timeout=60) for _ in calls]
    assert {error.status() for error in errors if isinstance(error, InferenceServerException)} == {
        "StatusCode.CANCELLED"
    }
    assert whole_tokens(unary(url, "generation_unary", token_request(IDS, NUM_TOKENS, False)), len(IDS)) == greedy


@row("token client", "an adapter comes with lora_task_id, lora_weights and lora_config once, then by its id alone")
def test_an_adapter_of_the_token_client(url: str, greedy: list[int], triplet: Tensors) -> None:
    first = stream(url, "tensorrt_llm", token_request(IDS, NUM_TOKENS, True, **triplet))
    later = stream(url, "tensorrt_llm", token_request(IDS, NUM_TOKENS, True, **only_id(triplet)))
    assert streamed_tokens(first) == streamed_tokens(later) != greedy
    digest = first[0].as_numpy("lora_digest")
    assert digest.shape == (1, 1)
    for result in (*first, *later):
        assert result.as_numpy("lora_task_id_out").tolist() == triplet["lora_task_id"].tolist()
        assert result.as_numpy("lora_digest").tolist() == digest.tolist()


@row("token client", "beam_width over 1: all beams in one response, the likeliest first; len_penalty, early_stopping")
def test_beams(url: str) -> None:
    options = {"beam_width": integer(3), "return_log_probs": flag(), "early_stopping": flag()}
    options |= {"len_penalty": real(0.0), "beam_search_diversity_rate": real(0.0)}
    (result,) = stream(url, "tensorrt_llm", token_request(IDS, NUM_TOKENS, False, **options))
    lengths, beams = result.as_numpy("sequence_length"), result.as_numpy("output_ids")
    assert (lengths.shape, beams.shape[:2]) == ((1, 3), (1, 3))
    answers = [tuple(beam[: lengths[0, i]]) for i, beam in enumerate(beams[0])]
    assert len(set(answers)) == 3
    assert all(list(answer[: len(IDS)]) == IDS for answer in answers)
    log_probs = result.as_numpy("cum_log_probs")[0].tolist()
    assert log_probs == sorted(log_probs, reverse=True)


@row("token client", "beam_width over 1 while streaming, which its client does not read either", "refused")
def test_streamed_beams(url: str) -> None:
    with pytest.raises(InferenceServerException, match=r"\[UNSUPPORTED\] beam_width 2 together with streaming"):
        stream(url, "tensorrt_llm", token_request(IDS, 3, True, beam_width=integer(2)))


@row("token client", "return_context_logits and return_generation_logits: [tokens, vocabulary] of the one beam")
def test_logits(url: str, greedy: list[int]) -> None:
    wanted = {"return_context_logits": flag(), "return_generation_logits": flag()}
    (result,) = stream(url, "tensorrt_llm", token_request(IDS, 2, False, **wanted))
    context, generation = result.as_numpy("context_logits"), result.as_numpy("generation_logits")
    assert context.shape == (1, len(IDS), generation.shape[-1])
    assert generation.shape[:3] == (1, 1, 2)
    assert generation[0, 0].argmax(-1).tolist() == greedy[:2]
    (without,) = stream(url, "tensorrt_llm", token_request(IDS, 1, False, **{name: flag(False) for name in wanted}))
    assert not {"context_logits", "generation_logits"} & names_of(without)


# The text client.


@row("text client", "five tensors in, text_output out, whole and streamed, from ensemble and tensorrt_llm_bls")
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_the_text_client(url: str, greedy: list[int], vocabulary: tokenizers.Tokenizer, model: str) -> None:
    expected = vocabulary.decode(greedy)
    streamed = stream(url, model, text_request(PROMPT, NUM_TOKENS, True), ["text_output"])
    assert text_of(streamed) == expected
    (whole,) = stream(url, model, text_request(PROMPT, NUM_TOKENS, False), ["text_output"])
    assert text_of([whole]) == PROMPT + expected
    assert names_of(whole) == {"text_output"}


@row("text client", "an adapter by its three tensors, then by its id, from ensemble and tensorrt_llm_bls")
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_an_adapter_of_the_text_client(url: str, triplet: Tensors, model: str) -> None:
    first = text_of(stream(url, model, text_request(PROMPT, NUM_TOKENS, True, **triplet)))
    later = text_of(stream(url, model, text_request(PROMPT, NUM_TOKENS, True, **only_id(triplet))))
    assert first == later != text_of(stream(url, model, text_request(PROMPT, NUM_TOKENS, True)))


@row("text client", "text_output has one dimension, [rows x beams], and so has OUTPUT of postprocessing")
@pytest.mark.parametrize("model", ["ensemble", "ensemble_unary", "tensorrt_llm_bls"])
def test_texts_have_one_dimension(url: str, model: str) -> None:
    single = text_request(PROMPT, 3, False, beam_width=integer(2))
    request = {name: np.concatenate([array, array]) for name, array in single.items()}
    results = [unary(url, model, request)] if model == "ensemble_unary" else stream(url, model, request)
    each = [result.as_numpy("text_output") for result in results]
    assert [texts.shape for texts in each] == ([(4,)] if model == "ensemble_unary" else [(2,), (2,)])
    texts = np.concatenate(each)
    assert texts.dtype == np.object_
    assert [text.decode()[: len(PROMPT)] for text in texts] == [PROMPT] * 4
    assert texts[:2].tolist() == texts[2:].tolist()


@row("text client", "without streaming, over unary gRPC")
def test_the_text_client_over_unary_calls(url: str) -> None:
    result = unary(url, "ensemble_unary", text_request(PROMPT, NUM_TOKENS, False), outputs=["text_output"])
    assert text_of([result]) == text_of(stream(url, "ensemble", text_request(PROMPT, NUM_TOKENS, False)))


@row("text client", "cancelling a stream of tensorrt_llm_bls ends its requests at once")
def test_cancelled_text_streams(url: str) -> None:
    with session(url, "tensorrt_llm_bls") as opened:
        fill_the_batch(opened, text_request(PROMPT, 4000, True, end_id=integer(-1)))
        opened.client.stop_stream(cancel_requests=True)
    assert text_of(stream(url, "tensorrt_llm_bls", text_request(PROMPT, 3, True)))


@row("text client", "what came through the ensemble ends by a stop request to tensorrt_llm under its id")
def test_a_stop_request_for_an_ensembles_request(url: str) -> None:
    with session(url, "ensemble") as opened, session(url, "tensorrt_llm") as other:
        opened.send(text_request(PROMPT, 2000, True, end_id=integer(-1)), "through")
        opened.next()
        other.send(stop_request(), "through")
        other.finish()
        assert len(opened.finish()) < 2000


# Triton's OpenAI front end.


@row("OpenAI front end", "exactly one text, with num_input_tokens and, of each response of a stream, num_output_tokens")
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_the_front_ends_counts(url: str, model: str) -> None:
    request = openai_request(PROMPT, NUM_TOKENS, False, exclude_input_in_output=flag())
    (result,) = stream(url, model, request)
    assert result.as_numpy("text_output").shape == (1,)
    assert counts_of(result) == ([[5]], [[NUM_TOKENS]])
    streamed = stream(url, model, openai_request(PROMPT, NUM_TOKENS, True, exclude_input_in_output=flag()))
    assert text_of(streamed) == text_of([result])
    assert {counts_of(piece)[0][0][0] for piece in streamed} == {5}
    # The front end adds up the counts of a stream.
    assert sum(piece.as_numpy("num_output_tokens")[0][0] for piece in streamed) == NUM_TOKENS
    assert [piece.as_numpy("num_output_tokens_so_far").tolist() for piece in streamed[-1:]] == [[[NUM_TOKENS]]]


def counts_of(result: Any) -> tuple[list[list[int]], list[list[int]]]:
    counts = [result.as_numpy(name) for name in ("num_input_tokens", "num_output_tokens")]
    assert all(count.dtype == np.int32 for count in counts)
    return counts[0].tolist(), counts[1].tolist()


@row("OpenAI front end", "stop_words, top_p, penalties, seed, temperature and a json_schema guide")
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_the_front_ends_options(url: str, model: str) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    schema |= {"additionalProperties": False}
    options = {
        "stop_words": np.array([[b"\n\n", b"###"]], object),
        "top_p": real(0.9),
        "frequency_penalty": real(0.5),
        "presence_penalty": real(0.5),
        "seed": seed_of(5),
        "temperature": real(0.7),
        "exclude_input_in_output": flag(),
        "guided_decoding_guide_type": np.array([[b"json_schema"]], object),
        "guided_decoding_guide": np.array([[json.dumps(schema).encode()]], object),
    }
    answers = {text_of(stream(url, model, openai_request(PROMPT, 60, False, **options))) for _ in range(2)}
    (answer,) = answers
    jsonschema.validate(json.loads(answer), schema)


@row("OpenAI front end", "adapters it sends once and from then on calls by their ids 1, 2, 3")
def test_the_front_ends_adapters(url: str) -> None:
    samples = [convert_peft(PIRATE.parent / name) for name in ("pirate", "json")]
    adapters = [adapter_tensors(Adapter(i, sample)) for i, sample in enumerate(samples, 1)]
    adapters = [
        {**only_id(a), "lora_weights": a["lora_weights_bf16"].astype(np.float16), "lora_config": a["lora_config"]}
        for a in adapters
    ]
    for adapter in adapters:
        adapter["lora_task_id"] = np.array([[next(fresh_ids)]], np.uint64)
        first, later = (
            text_of(stream(url, "ensemble", openai_request(PROMPT, NUM_TOKENS, False, **tensors)))
            for tensors in (adapter, only_id(adapter))
        )
        assert first == later
