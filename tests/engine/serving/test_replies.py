from __future__ import annotations

import msgspec
import numpy as np
import pytest
from support.fake_triton import FakeRequest, FakeTensor

from multilora_engine.request import PerfMetrics, TokenLogProb, TokenOutput
from multilora_engine.sequences.prompt_log_probs import row_type
from multilora_engine.serving.outputs import PromptTokens, ReplyRow
from multilora_engine.serving.replies import EachReply, EmptyReply, OneReply, Reply, Responder, StreamReply, Transcript
from multilora_engine.serving.triton_api import backend_utils


def token(request_id: str, token_id: int, finish_reason: str | None = None, so_far: int = 1) -> TokenOutput:
    return TokenOutput(
        request_id, [token_id], f"<{token_id}>", finish_reason, num_prompt_tokens=2, num_output_tokens=so_far
    )


def tell(reply: Reply, output: TokenOutput) -> None:
    reply.on_output(output)
    reply.flush()


def test_nothing_is_sent_before_it_is_flushed_and_then_in_order() -> None:
    request = FakeRequest({})
    reply = StreamReply(Responder(request), {"a": ReplyRow()}, pad_id=0)
    reply.on_output(token("a", 1))
    reply.on_output(token("a", 2, "stop"))
    assert request.sender.responses == []
    reply.flush()
    reply.flush()
    assert [response.texts() for response in request.sender.wait()] == [["<1>"], ["<2>"]]


def test_a_reply_knows_the_size_of_its_logits_until_they_are_sent() -> None:
    responder = Responder(FakeRequest({}, output_names=("output_ids", "context_logits")))
    reply = StreamReply(responder, {"a": ReplyRow(vocab_size=512, num_context_tokens=2)}, pad_id=0)
    reply.on_output(token("a", 1))
    num_bytes_of_token = reply.unsent_bytes
    reply.flush()
    assert reply.unsent_bytes == 0
    logits = np.zeros((2, 512), np.float32).tobytes()
    reply.on_output(msgspec.structs.replace(token("a", 2, so_far=2), context_logits=logits))
    assert reply.unsent_bytes == num_bytes_of_token + len(logits)
    reply.flush()
    assert reply.unsent_bytes == 0


def test_a_stream_sends_new_tokens_only_and_the_final_flag_with_the_last_ones() -> None:
    request = FakeRequest({})
    reply = StreamReply(Responder(request), {"a": ReplyRow(0), "b": ReplyRow(1, 2, lora_task_id=7)}, pad_id=0)
    for output in (token("a", 1), token("b", 2, "length"), token("a", 3, "stop")):
        tell(reply, output)
    responses = request.sender.wait()
    assert [response.texts() for response in responses] == [["<1>"], ["<2>"], ["<3>"]]
    assert [response.arrays["output_ids"].tolist() for response in responses] == [[[[1]]], [[[2]]], [[[3]]]]
    assert [response.arrays["sequence_length"].item() for response in responses] == [1, 1, 1]
    assert [response.arrays["batch_index"].item() for response in responses] == [0, 1, 0]
    assert [response.arrays["sequence_index"].item() for response in responses] == [0, 2, 0]
    assert [response.arrays["finish_reason"].item() for response in responses] == [b"", b"length", b"stop"]
    assert [response.arrays["lora_task_id_out"].item() for response in responses] == [0, 7, 0]


def test_what_a_stream_says_again_is_the_same_tensor_and_what_is_new_another(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    class CountedTensor(FakeTensor):
        def __init__(self, name: str, value: np.ndarray) -> None:
            super().__init__(name, value)
            made.append(name)

    monkeypatch.setattr(backend_utils(), "Tensor", CountedTensor)
    request = FakeRequest({})
    reply = StreamReply(Responder(request), {"a": ReplyRow(0), "b": ReplyRow(1)}, pad_id=0)
    tell(reply, token("a", 1))
    made.clear()
    tell(reply, token("a", 2, so_far=2))
    assert sorted(made) == ["num_output_tokens_so_far", "output_ids", "text_output"]
    made.clear()
    tell(reply, msgspec.structs.replace(token("b", 3), lora_digest="d"))
    told = ["batch_index", "lora_digest", "num_output_tokens_so_far", "output_ids", "stop_id", "text_output"]
    assert sorted(made) == told
    assert [response.arrays["batch_index"].item() for response in request.sender.responses] == [0, 0, 1]
    assert [response.arrays["lora_digest"].item() for response in request.sender.responses] == [b"", b"", b"d"]


def test_one_response_has_all_rows_in_their_order_whichever_ends_first() -> None:
    request = FakeRequest({})
    transcripts = {"a": Transcript(ReplyRow(0), [8, 9], "prompt "), "b": Transcript(ReplyRow(1))}
    reply = OneReply(Responder(request), transcripts, pad_id=5)
    for output in (token("b", 2, "length"), token("a", 1), token("a", 3, "stop")):
        assert request.sender.responses == []
        tell(reply, output)
    (response,) = request.sender.wait()
    assert response.texts() == ["prompt <1><3>", "<2>"]
    assert response.arrays["output_ids"].tolist() == [[[8, 9, 1, 3]], [[2, 5, 5, 5]]]
    assert response.arrays["sequence_length"].tolist() == [[4], [1]]
    assert response.arrays["finish_reason"].tolist() == [[b"stop"], [b"length"]]


def test_each_sequence_has_a_response_of_its_own_when_it_ends() -> None:
    request = FakeRequest({})
    transcripts = {"a": Transcript(ReplyRow(0, 0), [8], "prompt "), "b": Transcript(ReplyRow(0, 1), [8], "prompt ")}
    reply = EachReply(Responder(request), transcripts, pad_id=5)
    for output in (token("a", 1), token("b", 2, "length"), token("a", 3, "stop")):
        tell(reply, output)
    responses = request.sender.wait()
    assert [response.texts() for response in responses] == [["prompt <2>"], ["prompt <1><3>"]]
    assert [response.arrays["output_ids"].tolist() for response in responses] == [[[[8, 2]]], [[[8, 1, 3]]]]
    assert [response.arrays["sequence_index"].item() for response in responses] == [1, 0]


def test_a_response_of_a_stream_counts_its_own_tokens_and_tells_their_sum() -> None:
    request = FakeRequest({})
    reply = StreamReply(Responder(request), {"a": ReplyRow(0), "b": ReplyRow(1)}, pad_id=0)
    outputs = (token("a", 1, so_far=2), token("b", 2, so_far=1), token("a", 3, so_far=5), token("b", 4, "stop", 2))
    for output in (*outputs, token("a", 5, "length", so_far=5)):
        tell(reply, output)
    arrays = [response.arrays for response in request.sender.wait()]
    assert [made["num_output_tokens"].tolist() for made in arrays] == [[[n]] for n in (2, 1, 3, 1, 0)]
    assert [made["num_output_tokens_so_far"].tolist() for made in arrays] == [[[n]] for n in (2, 1, 5, 2, 5)]


@pytest.mark.parametrize("kind", [StreamReply, OneReply])
def test_the_first_output_of_every_response_is_output_ids(kind: type[Reply]) -> None:
    request = FakeRequest({})
    row = ReplyRow(returns_log_probs=True, returns_perf=True)
    reply = kind(Responder(request), {"a": row if kind is StreamReply else Transcript(row)}, 0)
    tell(reply, token("a", 1))
    tell(reply, msgspec.structs.replace(token("a", 2, "stop"), perf=PerfMetrics()))
    responses = request.sender.wait()
    assert [next(iter(response.arrays)) for response in responses] == ["output_ids"] * len(responses)


@pytest.mark.parametrize(("flag", "has_times"), [("returns_kv_cache", False), ("returns_perf", True)])
def test_blocks_of_the_kv_cache_are_told_with_times_or_alone(flag: str, has_times: bool) -> None:
    request = FakeRequest({})
    reply = StreamReply(Responder(request), {"a": ReplyRow(**{flag: True})}, 0)  # type: ignore[arg-type]
    perf = PerfMetrics(5, kv_cache_alloc_total_blocks=4, kv_cache_alloc_new_blocks=3, kv_cache_reused_blocks=1)
    tell(reply, msgspec.structs.replace(token("a", 1, "stop"), perf=perf))
    (response,) = request.sender.wait()
    blocks = ("kv_cache_alloc_total_blocks", "kv_cache_alloc_new_blocks", "kv_cache_reused_blocks")
    assert [response.arrays[name].tolist() for name in blocks] == [[[4]], [[3]], [[1]]]
    assert ("arrival_time_ns" in response.arrays) == has_times


@pytest.mark.parametrize("names", [("text_output",), ("finish_reason", "lora_digest"), ()])
def test_exactly_the_requested_outputs_are_sent(names: tuple[str, ...]) -> None:
    request = FakeRequest({}, output_names=names)
    tell(StreamReply(Responder(request), {"a": ReplyRow()}, 0), token("a", 1, "stop"))
    assert set(request.sender.wait()[0].arrays) == set(names)


@pytest.mark.parametrize("kind", [StreamReply, OneReply])
def test_an_error_is_the_final_response_after_what_was_sent(kind: type[Reply]) -> None:
    request = FakeRequest({}, id="ab12")
    row = ReplyRow()
    reply = kind(Responder(request), {"a": row if kind is StreamReply else Transcript(row)}, 0)
    tell(reply, token("a", 1))
    tell(reply, TokenOutput("a", [], "", error_code="UNAVAILABLE", error_message="the engine process died"))
    *earlier, last = request.sender.wait()
    assert len(earlier) == (1 if kind is StreamReply else 0)
    assert last.arrays == {}
    assert last.error is not None
    assert (last.error.code, last.error.message) == (
        "UNAVAILABLE",
        "[UNAVAILABLE] the engine process died (request ab12)",
    )


def test_a_stop_is_answered_by_a_response_without_tensors() -> None:
    request = FakeRequest({})
    tell(EmptyReply(Responder(request)), TokenOutput("a", [], "", finish_reason="stop"))
    (response,) = request.sender.wait()
    assert (response.arrays, response.error) == ({}, None)


@pytest.mark.parametrize("kind", [StreamReply, OneReply])
def test_logits_of_the_prompt_come_once_and_those_of_the_answer_with_its_tokens(kind: type[Reply]) -> None:
    names = ("context_logits", "generation_logits", "top_log_prob_ids")
    request = FakeRequest({}, output_names=names)
    wanted = {f"returns_{name}": True for name in ("log_probs", "top_log_probs", "generation_logits")}
    row = ReplyRow(**wanted, vocab_size=2, num_context_tokens=3)
    reply = kind(Responder(request), {"a": row if kind is StreamReply else Transcript(row, [7], "prompt")}, 0)
    logits = np.arange(8, dtype=np.float32).reshape(4, 2)
    tops = [TokenLogProb(-0.5, ((token_id, -0.5),)) for token_id in range(3)]
    part = TokenOutput("a", [], "", num_prompt_tokens=3, context_logits=logits[1:3].tobytes())
    tell(reply, part)
    first = TokenOutput("a", [1, 2], "x", log_probs=tops[:2], generation_logits=logits[:2].tobytes())
    tell(reply, msgspec.structs.replace(first, num_prompt_tokens=3, context_logits=logits[3:].tobytes()))
    last = TokenOutput("a", [3], "y", "stop", log_probs=tops[2:], generation_logits=logits[2:3].tobytes())
    tell(reply, last)
    responses = [response.arrays for response in request.sender.wait()]
    assert responses[0]["context_logits"].tolist() == [logits[1:].tolist()]
    assert not any("context_logits" in response for response in responses[1:])
    np.testing.assert_array_equal(np.concatenate([r["generation_logits"][0, 0] for r in responses]), logits[:3])
    assert np.concatenate([r["top_log_prob_ids"][0, 0, :, 0] for r in responses]).tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", [StreamReply, OneReply])
def test_log_probs_go_with_their_tokens_and_times_with_the_last_response(kind: type[Reply]) -> None:
    request = FakeRequest({})
    row = ReplyRow(returns_log_probs=True, returns_perf=True)
    reply = kind(Responder(request), {"a": row if kind is StreamReply else Transcript(row, [7, 7], "prompt")}, 0)
    first = TokenOutput("a", [1, 2], "x", log_probs=[TokenLogProb(-0.5), TokenLogProb(-1.0)], cum_log_prob=-1.5)
    last = TokenOutput("a", [3], "y", "stop", log_probs=[TokenLogProb(-2.0)], cum_log_prob=-3.5, perf=PerfMetrics(5))
    tell(reply, first)
    tell(reply, last)
    responses = request.sender.wait()
    log_probs = [response.arrays["output_log_probs"].tolist() for response in responses]
    sums = [response.arrays["cum_log_probs"].item() for response in responses]
    if kind is StreamReply:
        assert (log_probs, sums) == ([[[[-0.5, -1.0]]], [[[-2.0]]]], [-1.5, -3.5])
        assert "arrival_time_ns" not in responses[0].arrays
    else:
        assert (log_probs, sums) == ([[[[-0.5, -1.0, -2.0]]]], [-3.5])
    assert responses[-1].arrays["arrival_time_ns"].item() == 5


def test_a_prompt_is_told_with_the_first_response_of_each_sequence() -> None:
    names = ("prompt_ids", "prompt_log_probs", "sequence_index", "num_cached_tokens")
    request = FakeRequest({}, output_names=names)
    prompt = PromptTokens([7, 8], 0, lambda token_id: bytes([token_id]))
    rows = {name: ReplyRow(sequence_index=i, prompt=prompt) for i, name in enumerate("ab")}
    reply = StreamReply(Responder(request), rows, 0)
    told = np.array([(0.0, [], []), (-1.5, [], [])], row_type(0)).tobytes()
    for name in "ab":
        first = msgspec.structs.replace(token(name, 1), prompt_log_probs=told, num_cached_tokens=16)
        tell(reply, first)
        tell(reply, token(name, 2, "stop"))
    responses = [response.arrays for response in request.sender.wait()]
    assert [response["sequence_index"].item() for response in responses] == [0, 0, 1, 1]
    assert ["prompt_ids" in response for response in responses] == [True, False, True, False]
    assert responses[2]["prompt_log_probs"].tolist() == [[0.0, -1.5]]
    assert responses[0]["num_cached_tokens"].tolist() == [[16]]


def test_one_response_tells_of_the_prompt_though_it_came_with_the_first_output() -> None:
    request = FakeRequest({}, output_names=("prompt_log_probs",))
    prompt = PromptTokens([7, 8], 0, lambda token_id: bytes([token_id]))
    reply = OneReply(Responder(request), {"a": Transcript(ReplyRow(prompt=prompt))})
    told = np.array([(0.0, [], []), (-1.5, [], [])], row_type(0)).tobytes()
    tell(reply, msgspec.structs.replace(token("a", 1), prompt_log_probs=told))
    tell(reply, token("a", 2, "stop"))
    (response,) = request.sender.wait()
    assert response.arrays["prompt_log_probs"].tolist() == [[0.0, -1.5]]
