"""The outputs about prompts, and how prompts are made, through the real server with the real model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from peft import PeftModel
from support.wire import GrpcClient, infer, stream, tensors
from transformers import AutoModelForCausalLM, AutoTokenizer

from multilora_client import ENSEMBLE, Adapter, AsyncClient, Chunk, Client, Generation, InvalidRequest
from multilora_engine.tritonserver import ServerProcess

PROMPT = "The capital of France is Paris, and 東京 is in Japan."
CHAT = [{"role": "user", "content": "Name a colour."}, {"role": "assistant", "content": "The colour is"}]
PIRATE = Path(__file__).parents[2] / "adapters" / "pirate"
Ask = Callable[..., Generation | Chunk]


@pytest.fixture(params=["grpc", "http"])
def each_client(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[Client]:
    """Our client, over gRPC and over HTTP."""
    with Client(url_of(server, request.param)) as client:
        yield client


def url_of(server: ServerProcess, scheme: str) -> str:
    return f"grpc://{server.grpc_url}" if scheme == "grpc" else f"http://{server.http_url}"


@pytest.fixture(scope="module")
def log_probs(default_model_dir: Path) -> Callable[[list[int], bool], torch.Tensor]:
    """The log-probs after each of some tokens, [tokens, vocab], by transformers, with the sample adapter or not."""
    base = AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(PIRATE)).eval().to(torch.float32)

    @torch.no_grad()
    def log_probs(token_ids: list[int], has_adapter: bool) -> torch.Tensor:
        ids = torch.tensor([token_ids])
        if has_adapter:
            return model(input_ids=ids).logits[0].log_softmax(dim=-1)  # type: ignore[no-any-return]
        with model.disable_adapter():
            return model(input_ids=ids).logits[0].log_softmax(dim=-1)  # type: ignore[no-any-return]

    return log_probs


def whole(client: Client, **options: Any) -> Generation:
    return client.generate(PROMPT, **options)


def first_piece(client: Client, **options: Any) -> Chunk:
    first, *others = client.stream(PROMPT, **options)
    assert not any(chunk.prompt for chunk in others)
    return first


@pytest.mark.parametrize("ask", [whole, first_piece])
@pytest.mark.parametrize("max_tokens", [0, 2])
@pytest.mark.parametrize("has_adapter", [False, True])
def test_log_probs_of_a_prompt_are_those_of_transformers(
    each_client: Client, ask: Ask, pirate: Adapter, max_tokens: int, has_adapter: bool, log_probs: Any
) -> None:
    adapter = pirate if has_adapter else None
    answer = ask(each_client, adapter=adapter, max_tokens=max_tokens, num_prompt_top_log_probs=3)
    prompt = answer.prompt
    assert prompt is not None
    assert len(prompt.token_ids) == answer.num_input_tokens
    expected = log_probs(prompt.token_ids, has_adapter)[:-1]
    chosen = expected.gather(1, torch.tensor(prompt.token_ids[1:])[:, None]).squeeze(1)
    assert prompt.log_probs == pytest.approx([0.0, *chosen.tolist()], abs=1e-3)
    top_values = [[value for _, value in top] for top in prompt.top_log_probs[1:]]
    np.testing.assert_allclose(top_values, expected.topk(3).values, atol=1e-3)
    assert prompt.top_log_probs[0] == []
    assert b"".join(tokens[0] for tokens in prompt.tokens).decode() == PROMPT
    if max_tokens == 0:
        assert (answer.text, answer.token_ids, answer.finish_reason) == ("", [], "length")
        assert answer.num_output_tokens == 0


def test_prompt_and_answer_line_up_with_the_tokens(client: Client, log_probs: Any) -> None:
    """As an evaluation wants them: chat tokens among the prompt's, the end token among the answer's."""
    messages = [{"role": "user", "content": "Say hi."}]
    answer = client.generate(messages=messages, max_tokens=40, return_log_probs=True, return_prompt_log_probs=True)
    assert answer.prompt is not None
    token_ids = [*answer.prompt.token_ids, *answer.token_ids]
    told = [*answer.prompt.log_probs, *answer.log_probs]
    assert len(told) == len(token_ids) == len(answer.prompt.tokens) + len(answer.tokens)
    expected = log_probs(token_ids, False)[:-1].gather(1, torch.tensor(token_ids[1:])[:, None]).squeeze(1)
    assert told == pytest.approx([0.0, *expected.tolist()], abs=1e-3)
    assert answer.finish_reason == "stop"
    spelled = b"".join(tokens[0] for tokens in answer.prompt.tokens).decode()
    assert spelled.startswith("<|im_start|>system\n")
    assert "<|im_end|>\n<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\n" in spelled


def test_rows_of_prompts_are_told_of_apart(triton_grpc: GrpcClient, server: ServerProcess) -> None:
    inputs = {"input_ids": np.array([[5, 6, 7], [8, 9, 0]], np.int32), "input_lengths": np.array([[3], [2]], np.int32)}
    inputs |= {"max_tokens": np.zeros((2, 1), np.int32), "return_prompt_log_probs": np.full((2, 1), True)}
    inputs |= {"num_return_sequences": np.full((2, 1), 2, np.int32)}
    result = infer(triton_grpc, "generation_unary", inputs)
    assert result.as_numpy("prompt_ids").tolist() == [[5, 6, 7], [8, 9, 0]]
    assert result.as_numpy("prompt_log_probs").shape == (2, 3)
    assert result.as_numpy("prompt_tokens").shape == (2, 3, 1)
    assert result.as_numpy("num_output_tokens_so_far").tolist() == [[0, 0]] * 2
    with stream(server.grpc_url, "generation", inputs | {"streaming": np.full((2, 1), True)}) as responses:
        told = {
            (int(r.as_numpy("batch_index").item()), int(r.as_numpy("sequence_index").item())): r.as_numpy("prompt_ids")
            for r in responses
        }
    assert {place: ids.tolist() for place, ids in told.items()} == {
        (row, sequence): [[[5, 6, 7], [8, 9]][row]] for row in range(2) for sequence in range(2)
    }


def test_several_answers_are_streamed_side_by_side(each_client: Client) -> None:
    options: dict[str, Any] = {"num_return_sequences": 3, "temperature": 1.0, "seed": 7, "max_tokens": 8, "end_id": -1}
    expected = each_client.generate(PROMPT, **options).alternatives
    chunks = list(each_client.stream(PROMPT, **options))
    assert_are_pieces_of(chunks, [alternative.text for alternative in expected])
    assert len({alternative.text for alternative in expected}) == 3


def assert_are_pieces_of(chunks: list[Chunk], texts: list[str]) -> None:
    joined = ["".join(c.text for c in chunks if c.sequence_index == i) for i in range(len(texts))]
    assert joined == texts
    assert [chunk.is_final for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    ends = [c for c in chunks if c.finish_reason is not None]
    assert sorted(c.sequence_index for c in ends) == list(range(len(texts)))
    assert [c.num_output_tokens for c in ends] == [8] * len(texts)


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_several_answers_are_streamed_to_asyncio_too(server: ServerProcess, client: Client, scheme: str) -> None:
    options: dict[str, Any] = {"num_return_sequences": 2, "temperature": 1.0, "seed": 9, "max_tokens": 8, "end_id": -1}

    async def collect() -> list[Chunk]:
        async with AsyncClient(url_of(server, scheme)) as aio:
            return [chunk async for chunk in aio.stream(PROMPT, **options)]

    expected = client.generate(PROMPT, **options).alternatives
    assert_are_pieces_of(asyncio.run(collect()), [alternative.text for alternative in expected])


def test_a_prompt_that_was_there_before_is_told_as_cached(each_client: Client) -> None:
    prompt = f"A prompt of its own for {type(each_client._transport).__name__}, " * 8
    first, again = (each_client.generate(prompt, max_tokens=1) for _ in range(2))
    scored = each_client.generate(prompt, max_tokens=1, return_prompt_log_probs=True)
    num_tokens = first.num_input_tokens
    assert num_tokens is not None
    cached = [answer.num_cached_tokens for answer in (first, again, scored)]
    assert cached == [0, (num_tokens - 1) // 16 * 16, 0]


def test_a_prompt_is_cut_to_its_end(each_client: Client, vocabulary: tokenizers.Tokenizer) -> None:
    token_ids = vocabulary.encode(PROMPT).ids
    options: dict[str, Any] = {"max_tokens": 0, "return_prompt_log_probs": True}
    cut = each_client.generate(PROMPT, truncate_prompt_tokens=4, **options)
    assert cut.prompt is not None
    assert cut.prompt.token_ids == token_ids[-4:]
    limit = each_client.describe_model().max_model_len
    long = each_client.generate(input_ids=[7] * limit, truncate_prompt_tokens=-1, max_tokens=limit - 5)
    assert long.num_input_tokens == 5


def test_ensembles_cut_prompts_and_keep_stop_words_as_well(server: ServerProcess, client: Client) -> None:
    with Client(f"grpc://{server.grpc_url}", door=ENSEMBLE) as ensemble:
        stop = {"stop_words": [","], "include_stop_str_in_output": True}
        for options in ({"truncate_prompt_tokens": 3}, {"add_special_tokens": False}, stop):
            expected = client.generate(PROMPT, max_tokens=12, **options)  # type: ignore[arg-type]
            answer = ensemble.generate(PROMPT, max_tokens=12, **options)  # type: ignore[arg-type]
            assert (answer.text, answer.num_input_tokens) == (expected.text, expected.num_input_tokens)
        assert ensemble.generate(PROMPT, max_tokens=0).finish_reason == "length"


def test_an_answer_ends_at_a_stop_token_and_keeps_a_stop_word_if_asked(each_client: Client) -> None:
    free = each_client.generate(PROMPT, max_tokens=12, end_id=-1)
    stop = next(i for i in free.token_ids[3:] if i not in free.token_ids[:3])
    length = free.token_ids.index(stop) + 1
    for answer in (
        each_client.generate(PROMPT, max_tokens=12, end_id=-1, stop_token_ids=[stop, 1]),
        list(each_client.stream(PROMPT, max_tokens=12, end_id=-1, stop_token_ids=[stop, 1]))[-1],
    ):
        assert (answer.num_output_tokens, answer.finish_reason) == (length, "stop")
    word = free.text[5:9]
    kept, cut = (
        each_client.generate(PROMPT, max_tokens=12, stop_words=[word], include_stop_str_in_output=keeps).text
        for keeps in (True, False)
    )
    assert kept == cut + word == free.text[: free.text.index(word)] + word


def test_the_server_tokenizes_as_the_tokenizers_own_library(
    each_client: Client, vocabulary: tokenizers.Tokenizer, default_model_dir: Path
) -> None:
    token_ids = vocabulary.encode(PROMPT).ids
    assert each_client.tokenize(PROMPT) == token_ids
    assert each_client.tokenize(PROMPT, add_special_tokens=False) == token_ids
    assert each_client.detokenize(token_ids) == PROMPT
    assert each_client.detokenize([]) == ""
    oracle = AutoTokenizer.from_pretrained(default_model_dir)
    for options in ({}, {"add_generation_prompt": False}, {"continue_final_message": True}):
        transformers_options = {"add_generation_prompt": not options, **options}
        expected = oracle.apply_chat_template(CHAT, return_dict=False, **transformers_options)
        assert each_client.tokenize(messages=CHAT, **options) == expected  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="may not set chat_template"):
        each_client.tokenize(messages=CHAT, chat_template_kwargs={"chat_template": "{{ 1 }}"})


def test_an_answer_goes_on_with_the_last_message(each_client: Client) -> None:
    prompt = each_client.detokenize(each_client.tokenize(messages=CHAT, continue_final_message=True))
    assert prompt.endswith("The colour is")
    answer = each_client.generate(messages=CHAT, continue_final_message=True, max_tokens=4)
    by_ids = each_client.generate(
        input_ids=each_client.tokenize(messages=CHAT, continue_final_message=True), max_tokens=4
    )
    assert answer.text == by_ids.text
    assert answer.num_input_tokens == by_ids.num_input_tokens


def test_the_model_is_described(each_client: Client, default_model_dir: Path) -> None:
    info = each_client.describe_model()
    assert info.model == default_model_dir.name
    assert (info.max_model_len, info.vocab_size) == (8192, 49152)
    assert info.version


def test_plain_clients_get_prompts_log_probs_as_well(triton_grpc: GrpcClient) -> None:
    inputs = tensors(text_input=PROMPT, max_tokens=0) | {"num_prompt_top_log_probs": np.array([[2]], np.int32)}
    result = infer(triton_grpc, "generation_unary", inputs)
    num_tokens = int(result.as_numpy("num_input_tokens").item())
    shapes = {name: result.as_numpy(name).shape for name in ("prompt_ids", "prompt_log_probs")}
    assert set(shapes.values()) == {(1, num_tokens)}
    assert result.as_numpy("prompt_top_log_prob_ids").shape == (1, num_tokens, 2)
    assert result.as_numpy("prompt_tokens").shape == (1, num_tokens, 3)
