"""Sampling options and their outputs, through the real server with the real model."""

from __future__ import annotations

import numpy as np
import pytest
from support.wire import GrpcClient, infer, stream, tensors, text_of

from multilora_client import DIRECT, ENSEMBLE, Client, Door
from multilora_engine.tritonserver import ServerProcess

PROMPT = "The capital of France is"
LOG_PROBS = {"cum_log_probs", "output_log_probs"}
PERF = {
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "last_token_time_ns",
    "kv_cache_alloc_total_blocks",
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
}


def ask(**options: object) -> dict[str, np.ndarray]:
    return tensors(text_input=PROMPT, max_tokens=12, exclude_input_in_output=True, **options)


def names(result: object) -> set[str]:
    return {output.name for output in result.get_response().outputs}  # type: ignore[attr-defined]


@pytest.mark.parametrize("model", ["generation_unary", "ensemble_unary"])
def test_options_change_the_answer_and_log_probs_tell_how_likely_it_was(triton_grpc: GrpcClient, model: str) -> None:
    plain = infer(triton_grpc, model, ask())
    assert " Paris" in text_of(plain)
    changed = ask(
        bad_words=[" Paris"],
        embedding_bias_words=[" Lyon"],
        embedding_bias_weights=[12.0],
        repetition_penalty=1.2,
        frequency_penalty=2.0,
        min_p=0.02,
        seed=3,
        return_log_probs=True,
        return_perf_metrics=True,
    )
    result = infer(triton_grpc, model, changed)
    assert " Lyon" in text_of(result)
    assert " Paris" not in text_of(result)
    assert text_of(infer(triton_grpc, model, changed)) == text_of(result)
    log_probs = result.as_numpy("output_log_probs")
    assert log_probs.shape == (1, 1, 12)
    assert (log_probs < 0).all()
    assert result.as_numpy("cum_log_probs").item() == pytest.approx(log_probs.sum(), rel=1e-4)
    times = [result.as_numpy(name).item() for name in ("arrival_time_ns", "first_token_time_ns", "last_token_time_ns")]
    assert 0 < times[0] < times[1] < times[2]
    assert result.as_numpy("kv_cache_alloc_total_blocks").item() >= 1


@pytest.mark.parametrize("model", ["generation_unary", "ensemble_unary"])
def test_what_was_not_asked_for_is_not_sent(triton_grpc: GrpcClient, model: str) -> None:
    assert not names(infer(triton_grpc, model, ask())) & {*LOG_PROBS, *PERF}


@pytest.mark.parametrize("model", ["generation_unary", "ensemble_unary"])
def test_top_log_probs_and_logits_tell_the_same(triton_grpc: GrpcClient, model: str) -> None:
    wanted = {"num_top_log_probs": 3, "return_context_logits": True, "return_generation_logits": True}
    result = infer(triton_grpc, model, ask(**wanted))
    generation, context = result.as_numpy("generation_logits"), result.as_numpy("context_logits")
    num_tokens = int(result.as_numpy("num_output_tokens").item())
    assert generation.shape[:3] == (1, 1, num_tokens)
    assert context.shape == (1, int(result.as_numpy("num_input_tokens").item()), generation.shape[-1])
    np.testing.assert_allclose(context[0, -1], generation[0, 0, 0], atol=1e-3)
    ids, values = result.as_numpy("top_log_prob_ids"), result.as_numpy("top_log_probs")
    assert ids.shape == values.shape == (1, 1, num_tokens, 3)
    np.testing.assert_array_equal(ids[..., 0], generation.argmax(-1))
    np.testing.assert_allclose(values[..., 0], result.as_numpy("output_log_probs"), atol=1e-3)


@pytest.mark.parametrize(("model", "flag"), [("generation", "streaming"), ("ensemble", "stream")])
def test_a_streams_log_probs_go_with_its_tokens(
    server: ServerProcess, triton_grpc: GrpcClient, model: str, flag: str
) -> None:
    whole = infer(triton_grpc, "generation_unary", ask(return_log_probs=True))
    request = ask(return_log_probs=True, return_perf_metrics=True, **{flag: True})
    with stream(server.grpc_url, model, request) as responses:
        results = list(responses)
    log_probs = np.concatenate([result.as_numpy("output_log_probs")[0, 0] for result in results])
    np.testing.assert_allclose(log_probs, whole.as_numpy("output_log_probs")[0, 0], atol=1e-3)
    assert "".join(map(text_of, results)) == text_of(whole)
    assert all(names(result) & PERF for result in results)
    assert results[-1].as_numpy("last_token_time_ns").item() > 0


def test_stop_and_bad_words_by_token_ids(triton_grpc: GrpcClient) -> None:
    plain = infer(triton_grpc, "generation_unary", ask())
    token_ids = plain.as_numpy("output_ids")[0, 0].tolist()
    ends = np.array([[token_ids[3:5], [2, -1]]], np.int32)
    stopped = infer(triton_grpc, "generation_unary", ask() | {"stop_words_list": ends})
    assert stopped.as_numpy("output_ids")[0, 0].tolist() == token_ids[:5]
    assert text_of(plain).startswith(text_of(stopped))
    banned = infer(triton_grpc, "generation_unary", ask() | {"bad_words_list": ends})
    banned_ids = banned.as_numpy("output_ids")[0, 0].tolist()
    assert banned_ids[:4] == token_ids[:4]
    assert banned_ids[4] != token_ids[4]


@pytest.mark.parametrize("door", [DIRECT, ENSEMBLE])
@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_the_client_tells_beams_and_how_likely_they_are(server: ServerProcess, door: Door, scheme: str) -> None:
    url = f"grpc://{server.grpc_url}" if scheme == "grpc" else f"http://{server.http_url}"
    with Client(url, door=door) as client:
        found = client.generate(PROMPT, beam_width=4, length_penalty=1.0, max_tokens=6, return_log_probs=True)
        told = client.generate(PROMPT, max_tokens=6, num_top_log_probs=2, return_generation_logits=True)
    assert len({answer.text for answer in found.alternatives}) == 4
    assert (found.text, found.cum_log_prob) == (found.alternatives[0].text, found.alternatives[0].cum_log_prob)
    assert all(sum(a.log_probs) == pytest.approx(a.cum_log_prob, rel=1e-4) for a in found.alternatives)
    assert told.generation_logits is not None
    best = [ranked[0][0] for ranked in told.top_log_probs]
    assert best == told.generation_logits.argmax(axis=1).tolist()
