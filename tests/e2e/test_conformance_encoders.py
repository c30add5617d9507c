"""What clients rely on where the model has an encoder: a server with a tiny random T5 against transformers and PEFT."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from peft import LoraConfig
from support.conformance import row
from support.documents import examples, run_bash
from support.encoder_decoders import VOCAB_SIZE, Adapters, make_model, save_t5_tokenizer
from support.openai_front import openai_front
from support.stock_clients import (
    Tensors,
    flag,
    integer,
    stream,
    streamed_tokens,
    text_request,
    token_request,
    unary,
    whole_tokens,
    words,
)
from transformers import AutoTokenizer
from tritonclient.utils import InferenceServerException

from multilora_client import Adapter, Client, convert_peft, load_adapter
from multilora_client.openai.catalogue import Catalogue
from multilora_engine.tritonserver import ServerProcess
from multilora_engine.tritonserver.upstream_models import UpstreamModels
from servers.started_server import started_server
from trials.fuzz_protocol import Fuzz, Tally, measure, read_facts

TEXTS = ["the dog sings a song", "hallo", "a big bad fox ! is here , and there"]
NUM_TOKENS = 12
CONFIGS = {
    "to-german": LoraConfig(task_type="SEQ_2_SEQ_LM", r=4),
    "to-french": LoraConfig(
        task_type="SEQ_2_SEQ_LM",
        target_modules="all-linear",
        r=3,
        use_rslora=True,
        use_dora=True,
        rank_pattern={"DenseReluDense.wo": 7},
    ),
}


class Served:
    """A server, the model that it serves, and two adapters for it, by transformers and PEFT.

    sources: `TEXTS` as tokens.
    """

    def __init__(self, server: ServerProcess, folder: Path, adapters: Adapters) -> None:
        self.server = server
        self.url, self.http_url = server.grpc_url, server.http_url
        self.folder = folder
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder / "base")
        self.sources: list[list[int]] = [self.tokenizer(text).input_ids for text in TEXTS]
        self._adapters = adapters
        self._names = [None, *adapters.names]

    def tokens(
        self,
        source: list[int],
        beginning: tuple[int, ...] = (0,),
        name: str | None = None,
        num_tokens: int = NUM_TOKENS,
        **options: Any,
    ) -> list[int]:
        """The answer by transformers, without its beginning."""
        with self._adapters.only(self._names.index(name) - 1) as model, torch.no_grad():
            whole = model.generate(  # type: ignore[operator]
                input_ids=torch.tensor([source]),
                decoder_input_ids=torch.tensor([beginning]),
                max_new_tokens=num_tokens,
                do_sample=False,
                use_cache=False,
                **options,
            )
        return list(whole[0, len(beginning) :].tolist())

    def text(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def adapter(self, name: str, task_id: int) -> Adapter:
        """As PEFT saved it."""
        return load_adapter(self.folder / "adapters" / name, task_id)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("t5")
    model = make_model("t5 v1.1")
    model.save_pretrained(save_t5_tokenizer(folder / "base"))
    adapters = Adapters.random(model, CONFIGS)
    adapters.model.save_pretrained(folder / "adapters")
    parameters = {"kv_cache_memory_bytes": "8MiB", "max_num_seqs": "8", "lora_cache_host_memory_bytes": "16MiB"}
    with started_server(folder / "base", upstream_models=UpstreamModels.DECOUPLED, overrides=parameters) as server:
        yield Served(server, folder, adapters)


def ask(served: Served, source: list[int], streaming: bool = False, **options: np.ndarray) -> list[int]:
    """The answer of `tensorrt_llm`, without its beginning, as the token client asks for it."""
    request = token_request(source, NUM_TOKENS, streaming, 1, exclude_input_in_output=flag(), **options)
    results = stream(served.url, "tensorrt_llm", request)
    return streamed_tokens(results) if streaming else whole_tokens(results[0], 0)


def ids(*token_ids: int) -> np.ndarray:
    return np.array([token_ids], np.int32)


@row("encoder-decoder models", "input_ids are the source; one pad token as decoder_input_ids means none")
@pytest.mark.parametrize("streaming", [False, True])
def test_a_source_alone(served: Served, streaming: bool) -> None:
    for source in served.sources:
        expected = served.tokens(source)
        assert ask(served, source, streaming) == expected
        for placeholder in (ids(0), ids(1)):  # the model's pad token, and the client's
            lengths = {"decoder_input_ids": placeholder, "decoder_input_lengths": integer(1)}
            assert ask(served, source, streaming, **lengths) == expected


@row("encoder-decoder models", "decoder_input_ids with decoder_input_lengths begin the answer, in batches, too")
def test_beginnings_of_answers(served: Served) -> None:
    beginnings = [(0,), (0, 7, 20, 9), (0, 30)]
    for source, beginning in zip(served.sources, beginnings, strict=True):
        assert ask(served, source, decoder_input_ids=ids(*beginning)) == served.tokens(source, beginning)
    request = rows_of(served, beginnings)
    expected = [served.tokens(*each) for each in zip(served.sources, beginnings, strict=True)]
    for excludes in (False, True):
        result = unary(
            served.url, "generation_unary", {**request, "exclude_input_in_output": np.full((3, 1), excludes)}
        )
        output_ids, lengths = result.as_numpy("output_ids"), result.as_numpy("sequence_length")
        told = [output_ids[i, 0, : lengths[i, 0]].tolist() for i in range(3)]
        assert told == [
            [*([] if excludes else begin), *answer] for begin, answer in zip(beginnings, expected, strict=True)
        ]
        assert result.as_numpy("num_input_tokens").flatten().tolist() == list(map(len, served.sources))
        texts = [text.decode() for text in result.as_numpy("text_output").flatten()]
        if not excludes:
            assert texts == [served.text(token_ids) for token_ids in told]


def rows_of(served: Served, beginnings: list[tuple[int, ...]]) -> Tensors:
    """One request of all sources."""
    tensors: dict[str, list[list[int]]] = {
        "input_ids": served.sources,
        "decoder_input_ids": [list(b) for b in beginnings],
    }
    filled = {
        name: np.array([row + [0] * (max(map(len, rows)) - len(row)) for row in rows], np.int32)
        for name, rows in tensors.items()
    }
    lengths = {f"{name.removesuffix('_ids')}_lengths": [[len(row)] for row in rows] for name, rows in tensors.items()}
    numbers = {**lengths, "max_tokens": [[NUM_TOKENS]] * 3, "runtime_top_k": [[1]] * 3}
    return {**filled, **{name: np.array(values, np.int32) for name, values in numbers.items()}}


@row("encoder-decoder models", "decoder_text_input begins the answer, from ensemble and tensorrt_llm_bls")
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls", "generation"])
def test_texts(served: Served, model: str) -> None:
    length = "max_tokens"
    for text, begins in zip(TEXTS, ("", "der", "x y"), strict=True):
        beginning = (0, *served.tokenizer(begins, add_special_tokens=False).input_ids)
        answer = served.tokens(served.tokenizer(text).input_ids, beginning)
        whole = served.text([*beginning, *answer])
        request = text_request(text, NUM_TOKENS, False)
        if model == "generation":
            request = {"text_input": words(text), length: integer(NUM_TOKENS)}
        if begins:
            request["decoder_text_input"] = words(begins)
        streaming = {"streaming" if model == "generation" else "stream": flag()}
        (result,) = stream(served.url, model, request)
        assert text_in(result) == whole
        pieces = [text_in(piece) for piece in stream(served.url, model, request | streaming)]
        assert "".join(pieces) == whole.removeprefix(served.text(list(beginning)))


def text_in(result: Any) -> str:
    return str(result.as_numpy("text_output").flatten()[0].decode())


@row("encoder-decoder models", "LoRA in both stacks, modules 8 to 12")
@pytest.mark.parametrize("form", ["PEFT's files", "tensors"])
def test_adapters_of_both_stacks(served: Served, form: str) -> None:
    with Client(f"grpc://{served.url}") as client:
        for task_id, name in enumerate(CONFIGS, 1 if form == "tensors" else 11):
            adapter = served.adapter(name, task_id)
            if form == "tensors":
                adapter = Adapter(
                    task_id, convert_peft(served.folder / "adapters" / name, base_model=served.folder / "base")
                )
            client.upload(adapter)
            for source in served.sources:
                expected = served.tokens(source, name=name)
                assert ask(served, source, lora_task_id=np.array([[task_id]], np.uint64)) == expected
                assert expected != served.tokens(source)


def test_beams(served: Served) -> None:
    source = served.sources[0]
    request = token_request(source, NUM_TOKENS, False, 1, exclude_input_in_output=flag())
    result = unary(served.url, "generation_unary", {**request, "beam_width": integer(3)})
    output_ids, lengths = result.as_numpy("output_ids"), result.as_numpy("sequence_length")
    # transformers counts the decoder's start among the tokens by which it divides.
    expected = served.tokens(source, num_beams=3, length_penalty=0.0, early_stopping=True)
    assert output_ids[0, 0, : lengths[0, 0]].tolist() == expected


@row("encoder-decoder models", "features, masks", "refused")
def test_what_no_encoder_takes(served: Served) -> None:
    request = token_request(served.sources[0], NUM_TOKENS, False)
    for name, value in (
        ("encoder_input_features", np.ones((1, 2, 2), np.float16)),
        ("encoder_output_lengths", integer(2)),
        ("cross_attention_mask", np.ones((1, 2, 2), np.bool_)),
        ("skip_cross_attn_blocks", flag()),
    ):
        with pytest.raises(InferenceServerException, match=rf"\[UNSUPPORTED\] {name}: this server has no "):
            stream(served.url, "tensorrt_llm", {**request, name: value})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"decoder_input_ids": ids(*[3] * 600)}, r"decoder's text has 600 tokens and max_model_len is 512"),
        ({"decoder_input_ids": ids(0, VOCAB_SIZE)}, r"decoder_input_ids holds 103 at position 1, expected 0 .. 102"),
        ({"decoder_input_ids": ids(0, -4)}, r"decoder_input_ids holds -4 at position 1"),
        (
            {"decoder_input_ids": ids(0, 4), "decoder_input_lengths": integer(3)},
            r"decoder_input_lengths is 3, expected 0",
        ),
        ({"input_ids": ids(*[3] * 300), "input_lengths": integer(300)}, r"source has 300 tokens and .* 256"),
        ({"input_ids": ids(VOCAB_SIZE), "input_lengths": integer(1)}, r"input_ids holds 103 at position 0"),
        ({"lora_task_id": np.array([[9]], np.uint64), "lora_start": integer(0)}, "NOT_FOUND|lora_start"),
    ],
)
def test_wrong_input_is_refused_with_names_and_numbers(served: Served, changes: Tensors, says: str) -> None:
    request = token_request(served.sources[0], NUM_TOKENS, False, 1)
    with pytest.raises(InferenceServerException, match=says):
        unary(served.url, "generation_unary", {**request, **changes})


def wire(rows: list[list[int]]) -> Tensors:
    weights = np.zeros((1, len(rows), 600), np.float16)
    return {
        "lora_weights": weights,
        "lora_config": np.array([rows], np.int32),
        "lora_task_id": np.array([[77]], np.uint64),
    }


@pytest.mark.parametrize(
    ("row_of_config", "says"),
    [
        (
            [1, 5, 2],
            r"Expected layerId to be in the range \[0, numModelLayers\): 5, numModelLayers is 5; .*3 to 4 encoder",
        ),
        (
            [9, 3, 2],
            r"lora module 9 \(cross_attn_q\) not enabled for layer 3; layers 0 to 2 are decoder.block, 3 to 4 enc",
        ),
        ([13, 0, 2], r"lora module 13 not enabled for this model; it has 0 attn_qkv"),
    ],
)
def test_rows_that_the_model_has_not_are_refused(served: Served, row_of_config: list[int], says: str) -> None:
    request = token_request(served.sources[0], NUM_TOKENS, False, 1)
    with pytest.raises(InferenceServerException, match=says):
        unary(served.url, "generation_unary", {**request, **wire([row_of_config])})


def test_openais_protocol_completes_and_has_no_chats(served: Served) -> None:
    name = "to-german"
    with openai_front(Catalogue("base", {name: served.adapter(name, 21)}), served.url) as url:
        front = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        options: Mapping[str, Any] = {"prompt": TEXTS[0], "max_tokens": NUM_TOKENS, "temperature": 0}
        for model, adapter in (("base", None), (name, name)):
            expected = served.text(served.tokens(served.sources[0], name=adapter))
            answer = front.completions.create(model=model, **options)
            assert answer.choices[0].text == expected
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == len(served.sources[0])
            pieces = front.completions.create(model=model, **options, stream=True)
            assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == expected
        with pytest.raises(openai.BadRequestError, match="the model has an encoder, and no chats"):
            front.chat.completions.create(model="base", messages=[{"role": "user", "content": "x"}])
        with pytest.raises(openai.BadRequestError, match="the model has an encoder, and no chats"):
            front.responses.create(model="base", input="x")
        with pytest.raises(openai.BadRequestError, match="echo: the model has an encoder") as refused:
            front.completions.create(model="base", prompt=TEXTS[0], echo=True)
        assert refused.value.param == "echo"
        with pytest.raises(openai.BadRequestError, match="max_num_encoder_tokens is 256") as refused:
            front.completions.create(model="base", prompt=[3] * 300)
        assert refused.value.code == "context_length_exceeded"


def test_the_example_of_a_translation_has_the_answers_of_two_adapters(served: Served) -> None:
    """As printed but for the ports: the folders of adapters have the names of the example."""
    example = examples()["translate"].replace("localhost:8000", served.http_url)
    printed = run_bash(f"export MULTILORA_URL=grpc://{served.url}\n{example}", served.folder / "adapters")
    source, sources = "the house is small", served.tokenizer("the house is small").input_ids
    assert source in example
    german, french, begun = printed.strip().splitlines()
    assert german.strip() == served.text(served.tokens(sources, name="to-german", num_tokens=128)).strip()
    assert french.strip() == served.text(served.tokens(sources, name="to-french", num_tokens=128)).strip()
    beginning = (0, *served.tokenizer("das", add_special_tokens=False).input_ids)
    answer = served.tokens(sources, beginning, "to-german", num_tokens=16)
    assert json.loads(begun)["text_output"] == served.text([*beginning, *answer])


@pytest.mark.long(reason="30 s")
def test_wrong_requests_are_answered_or_refused_and_the_server_is_none_the_worse(served: Served, seed: int) -> None:
    facts = read_facts(served.url, served.folder / "base")
    assert facts.has_encoder
    fuzz, tally = Fuzz(served.url, served.http_url, facts, seed, num_clients=4), Tally()
    processes = measure(served.server).processes.keys()
    with fuzz.cached_adapter():
        canaries = fuzz.canaries()
        fuzz.run(range(400), tally)
        assert fuzz.canaries() == canaries
    assert tally.failures == []
    assert measure(served.server).processes.keys() == processes, "a process died"
