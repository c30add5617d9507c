"""The contract of TensorRT-LLM's five Triton models, tensor by tensor, asked of the running server."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
import tritonclient.grpc
from support.conformance import IDS, NUM_TOKENS, PROMPT, row
from support.contract import INPUTS, OUTPUTS, REQUIRED, misfits
from support.stock_clients import (
    Tensors,
    flag,
    integer,
    names_of,
    real,
    seed_of,
    stream,
    streamed_tokens,
    text_of,
    text_request,
    token_request,
    unary,
    whole_tokens,
    words,
)
from tritonclient.utils import InferenceServerException

from multilora_engine.serving.unsupported import UNSUPPORTED_OPTIONS, UNSUPPORTED_TENSORS

PERF_OUTPUTS = {name for name in OUTPUTS["tensorrt_llm"] if name.endswith("_ns") or name.startswith("kv_cache_")}
BLOCK_OUTPUTS = {name for name in PERF_OUTPUTS if name.startswith("kv_cache_")}
DRAFT_OUTPUTS = {"acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens"}


def declared(url: str, model: str) -> Any:
    with tritonclient.grpc.InferenceServerClient(url) as client:
        return client.get_model_config(model).config


def assert_upstreams_tensors_are_declared(url: str, model: str) -> None:
    config = declared(url, model)
    assert misfits(config.input, INPUTS[model]) == []
    assert misfits(config.output, OUTPUTS[model]) == []
    assert {tensor.name for tensor in config.input if not tensor.optional} <= REQUIRED[model]
    assert config.max_batch_size > 0


def tokens(url: str, num_tokens: int = NUM_TOKENS, end_id: int = 2, **options: np.ndarray) -> list[int]:
    """The tokens of a stream of `tensorrt_llm`."""
    return streamed_tokens(stream(url, "tensorrt_llm", token_request(IDS, num_tokens, True, end_id, **options)))


def texts(url: str, model: str, streaming: bool = True, **options: np.ndarray) -> str:
    """All text of a stream of a text model."""
    return text_of(stream(url, model, text_request(PROMPT, NUM_TOKENS, streaming, **options)))


def word_list(*token_ids: list[int]) -> np.ndarray:
    flat = [token_id for word in token_ids for token_id in word]
    ends = np.cumsum([len(word) for word in token_ids]).tolist()
    return np.array([[flat, ends + [-1] * (len(flat) - len(ends))]], np.int32)


# preprocessing


@row("preprocessing", "every input and output is declared, with upstream's names, types and shapes")
def test_preprocessing_declares_all_tensors(url: str) -> None:
    assert_upstreams_tensors_are_declared(url, "preprocessing")


def preprocess(url: str, **tensors: np.ndarray) -> Any:
    return unary(url, "preprocessing", {"QUERY": words(PROMPT), "REQUEST_OUTPUT_LEN": integer(7), **tensors})


@row(
    "preprocessing",
    "QUERY becomes INPUT_ID and its length; REQUEST_OUTPUT_LEN passes; end and pad id of the tokenizer",
)
def test_preprocessing_tokenizes(url: str, vocabulary: tokenizers.Tokenizer) -> None:
    result = preprocess(url)
    assert result.as_numpy("INPUT_ID").tolist() == [vocabulary.encode(PROMPT).ids]
    values = [result.as_numpy(f"REQUEST_{name}").tolist() for name in ("INPUT_LEN", "OUTPUT_LEN")]
    assert values == [[[len(IDS)]], [[7]]]
    assert result.as_numpy("OUT_END_ID").tolist() == [[vocabulary.token_to_id("<|im_end|>")]]
    decoder = [result.as_numpy(name) for name in ("DECODER_INPUT_ID", "REQUEST_DECODER_INPUT_LEN")]
    assert [array.tolist() for array in decoder] == [result.as_numpy("OUT_PAD_ID").tolist(), [[1]]]
    request = {"decoder_input_ids": decoder[0], "decoder_input_lengths": decoder[1]}
    assert tokens(url, **request) == tokens(url), "what preprocessing gives is no decoder's input"
    given = preprocess(url, END_ID=integer(-1), PAD_ID=integer(5))
    assert (given.as_numpy("OUT_END_ID").tolist(), given.as_numpy("OUT_PAD_ID").tolist()) == ([[-1]], [[5]])


@row("preprocessing", "word lists become ids and ends, [2, n]; bias words a bias a token; absent ones are empty")
def test_preprocessing_makes_word_lists(url: str, vocabulary: tokenizers.Tokenizer) -> None:
    stop = [vocabulary.encode(word, add_special_tokens=False).ids for word in ("\n\n", " doggerel")]
    result = preprocess(
        url,
        STOP_WORDS_DICT=words("\n\n", " doggerel"),
        EMBEDDING_BIAS_WORDS=words(" Paris"),
        EMBEDDING_BIAS_WEIGHTS=real(-2.5),
    )
    assert result.as_numpy("STOP_WORDS_IDS").tolist() == word_list(*stop).tolist()
    assert result.as_numpy("BAD_WORDS_IDS").shape == (1, 2, 0)
    (paris,) = vocabulary.encode(" Paris", add_special_tokens=False).ids
    assert np.flatnonzero(result.as_numpy("EMBEDDING_BIAS")).tolist() == [paris]
    assert preprocess(url).as_numpy("EMBEDDING_BIAS").shape == (1, 0)


@row("preprocessing", "images, videos, prompt tables; without an encoder decoder texts", "refused")
def test_preprocessing_refuses_what_other_models_take(url: str) -> None:
    assert_refused(url, "preprocessing", {"QUERY": words(PROMPT), "REQUEST_OUTPUT_LEN": integer(7)})


def assert_refused(url: str, model: str, request: Tensors) -> None:
    """Every tensor that stands for something we do not do is UNSUPPORTED, by its name."""
    names = [name for name in INPUTS[model] if name in {*UNSUPPORTED_OPTIONS, *UNSUPPORTED_TENSORS}]
    assert names
    ask = unary if model == "preprocessing" else stream
    for name in names:
        with pytest.raises(InferenceServerException, match=rf"\[UNSUPPORTED\] .*{name}\b"):
            ask(url, model, request | {name: filled(*INPUTS[model][name])})


def filled(dtype: str, dims: tuple[int, ...]) -> np.ndarray:
    kinds = {"BOOL": bool, "STRING": object, "FP16": np.float16, "FP32": np.float32}
    shape = (1, *(2 if dim == -1 else dim for dim in dims))
    return np.full(shape, b"x" if dtype == "STRING" else 2, kinds.get(dtype) or np.dtype(dtype.lower()))


# tensorrt_llm


@row("tensorrt_llm", "every input and output is declared, with upstream's names, types and shapes")
def test_tensorrt_llm_declares_all_tensors(url: str) -> None:
    assert_upstreams_tensors_are_declared(url, "tensorrt_llm")


@row("tensorrt_llm", "lora_config is declared for 3 and for 4 columns")
def test_tensorrt_llm_leaves_the_columns_of_lora_config_open(url: str) -> None:
    (tensor,) = (tensor for tensor in declared(url, "tensorrt_llm").input if tensor.name == "lora_config")
    assert list(tensor.dims) == [-1, -1]


@row("tensorrt_llm", "input_ids, input_lengths and request_output_len are enough")
def test_three_tensors_are_enough(url: str, greedy: list[int]) -> None:
    full = token_request(IDS, NUM_TOKENS, False)
    request = {name: full[name] for name in ("input_ids", "input_lengths", "request_output_len")}
    (result,) = stream(url, "tensorrt_llm", request)
    assert whole_tokens(result, len(IDS)) == greedy
    assert result.as_numpy("output_ids").shape == (1, 1, len(IDS) + NUM_TOKENS)
    assert result.as_numpy("sequence_length").shape == (1, 1)


@row("tensorrt_llm", "temperature, runtime_top_k, runtime_top_p with min, decay, reset ids; seeds repeat answers")
def test_sampling_is_asked_for_and_repeats_by_its_seed(url: str, greedy: list[int]) -> None:
    options = {
        "temperature": real(1.5),
        "runtime_top_k": integer(50),
        "runtime_top_p": real(0.95),
        "runtime_top_p_min": real(0.5),
        "runtime_top_p_decay": real(0.9),
        "runtime_top_p_reset_ids": integer(2),
    }
    drawn = [tokens(url, **options, seed=seed_of(seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert greedy not in drawn


@row("tensorrt_llm", "repetition_penalty, presence_penalty, frequency_penalty and min_tokens")
def test_penalties_change_the_answer(url: str, greedy: list[int]) -> None:
    assert len(set(greedy)) < len(greedy), "nothing is said twice"
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert tokens(url, **{name: real(3.0)}) != greedy
    assert len(tokens(url, end_id=greedy[3])) <= 4
    assert len(tokens(url, end_id=greedy[3], min_tokens=integer(NUM_TOKENS))) == NUM_TOKENS


@row("tensorrt_llm", "stop_words_list, bad_words_list and embedding_bias by token ids")
def test_words_by_token_ids(url: str, greedy: list[int], vocabulary: tokenizers.Tokenizer) -> None:
    stopped = tokens(url, stop_words_list=word_list([7, 7], greedy[2:4]))
    assert stopped == greedy[: len(stopped)]
    assert len(stopped) <= 4
    assert greedy[0] not in tokens(url, bad_words_list=word_list([greedy[0]]))
    bias = np.zeros((1, vocabulary.get_vocab_size()), np.float32)
    bias[0, 7] = 1e4
    assert tokens(url, 3, embedding_bias=bias) == [7, 7, 7]


@row("tensorrt_llm", "guided_decoding_guide_type and guided_decoding_guide: json, json_schema, regex, ebnf_grammar")
def test_guides(url: str, vocabulary: tokenizers.Tokenizer) -> None:
    def answer(kind: str, guide: str) -> str:
        guided = {"guided_decoding_guide_type": words(kind), "guided_decoding_guide": words(guide)}
        return str(vocabulary.decode(tokens(url, 60, **guided)))

    assert answer("regex", "[0-9]{3}").isdigit()
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    schema |= {"additionalProperties": False}
    jsonschema.validate(json.loads(answer("json_schema", json.dumps(schema))), schema)
    assert answer("ebnf_grammar", 'root ::= "left" | "right"') in ("left", "right")
    assert answer("json", "").startswith(("{", "["))


@row("tensorrt_llm", "return_log_probs: cum_log_probs and output_log_probs")
def test_log_probs(url: str) -> None:
    request = token_request(IDS, NUM_TOKENS, False, return_log_probs=flag())
    (result,) = stream(url, "tensorrt_llm", request)
    log_probs = result.as_numpy("output_log_probs")
    assert log_probs.shape == (1, 1, NUM_TOKENS)
    assert result.as_numpy("cum_log_probs")[0, 0] == pytest.approx(log_probs.sum(), rel=1e-4)
    (without,) = stream(url, "tensorrt_llm", token_request(IDS, 1, False))
    assert not {"cum_log_probs", "output_log_probs"} & names_of(without)


@row("tensorrt_llm", "return_perf_metrics: times, KV cache blocks, and 0 draft tokens")
def test_perf_metrics(url: str) -> None:
    (result,) = stream(url, "tensorrt_llm", token_request(IDS, 3, False, return_perf_metrics=flag()))
    names = [f"{name}_time_ns" for name in ("arrival", "first_scheduled", "first_token", "last_token")]
    times = [result.as_numpy(name) for name in names]
    assert [(time.shape, time.dtype) for time in times] == [((1, 1), np.int64)] * 4
    assert 0 < times[0] <= times[1] < times[2] < times[3]
    assert_blocks_are_told(result)
    assert [result.as_numpy(name).tolist() for name in sorted(DRAFT_OUTPUTS)] == [[[0]]] * 3
    (without,) = stream(url, "tensorrt_llm", token_request(IDS, 1, False))
    assert not {*PERF_OUTPUTS, *DRAFT_OUTPUTS} & names_of(without)


def assert_blocks_are_told(result: Any) -> None:
    blocks = {name: result.as_numpy(name) for name in sorted(BLOCK_OUTPUTS)}
    assert {(array.shape, array.dtype) for array in blocks.values()} == {((1, 1), np.dtype(np.int32))}
    assert blocks["kv_cache_alloc_total_blocks"] >= 1


@row(
    "tensorrt_llm",
    "return_kv_cache_reuse_stats (v0.16 to v0.18.2): KV cache blocks alone, at the text doors, too; in each response "
    "of a stream",
)
@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble", "tensorrt_llm_bls"])
def test_kv_cache_stats(url: str, model: str) -> None:
    wanted = {"return_kv_cache_reuse_stats": flag()}
    make = partial(token_request, IDS) if model == "tensorrt_llm" else partial(text_request, PROMPT)
    request = make(3, False)
    (result,) = stream(url, model, {**request, **wanted})
    for told in (result, *stream(url, model, {**make(3, True), **wanted})):
        assert_blocks_are_told(told)
        assert not ({*PERF_OUTPUTS, *DRAFT_OUTPUTS} - BLOCK_OUTPUTS) & names_of(told)
    (without,) = stream(url, model, request)
    assert not {*PERF_OUTPUTS, *DRAFT_OUTPUTS} & names_of(without)


@row("tensorrt_llm", "return_num_input_tokens and return_num_output_tokens")
def test_token_counts(url: str) -> None:
    counts = {"return_num_input_tokens": flag(), "return_num_output_tokens": flag()}
    (result,) = stream(url, "tensorrt_llm", token_request(IDS, 3, False, **counts))
    assert (result.as_numpy("num_input_tokens").tolist(), result.as_numpy("num_output_tokens").tolist()) == (
        [[5]],
        [[3]],
    )


@row(
    "tensorrt_llm",
    "prompt tables, images, draft tokens, retention, disaggregated prefill; without an encoder decoder inputs",
    "refused",
)
def test_tensorrt_llm_refuses_what_it_does_not_do(url: str) -> None:
    assert_refused(url, "tensorrt_llm", token_request(IDS, 1, True))


# postprocessing


@row("postprocessing", "both inputs and the output are declared, with upstream's names, types and shapes")
def test_postprocessing_declares_all_tensors(url: str) -> None:
    assert_upstreams_tensors_are_declared(url, "postprocessing")


@row("postprocessing", "OUTPUT has a text a beam, [rows x beams], of as many tokens as SEQUENCE_LENGTH says")
def test_postprocessing_decodes_each_beam_to_its_length(url: str) -> None:
    tokens_batch = np.array([[[*IDS], [*IDS[:2], 7, 7, 7]]], np.int32)
    lengths = np.array([[5, 2]], np.int32)
    result = unary(url, "postprocessing", {"TOKENS_BATCH": tokens_batch, "SEQUENCE_LENGTH": lengths})
    assert result.as_numpy("OUTPUT").tolist() == [PROMPT.encode(), b"The capital"]


# ensemble


@row("ensemble", "every input and output is declared, with upstream's names, types and shapes")
def test_the_ensemble_declares_all_tensors(url: str) -> None:
    assert_upstreams_tensors_are_declared(url, "ensemble")


@row("ensemble", "text_input to text_output: the text of the same tokens, whole after the prompt, streamed without it")
def test_the_ensemble_answers_in_text(url: str, greedy: list[int], vocabulary: tokenizers.Tokenizer) -> None:
    text = vocabulary.decode(greedy)
    assert texts(url, "ensemble") == text
    assert texts(url, "ensemble", streaming=False) == PROMPT + text


@row("ensemble", "stop_words, bad_words, embedding_bias_words and their weights")
def test_the_ensembles_words(url: str) -> None:
    assert_words_count(url, "ensemble")


def assert_words_count(url: str, model: str) -> None:
    plain = texts(url, model)
    stop = plain[1:8]
    assert texts(url, model, stop_words=words(stop)) == plain[: plain.index(stop)]
    assert " Paris" in plain
    changed = texts(
        url,
        model,
        bad_words=words(" Paris"),
        embedding_bias_words=words(" Lyon"),
        embedding_bias_weights=real(12.0),
    )
    assert " Paris" not in changed
    assert " Lyon" in changed


@row("ensemble", "top_k, top_p, temperature, seed, end_id, min_tokens, penalties and length_penalty under their names")
def test_the_ensembles_options(url: str) -> None:
    assert_options_count(url, "ensemble")


def assert_options_count(url: str, model: str) -> None:
    sampled = {"top_k": integer(50), "top_p": real(0.95), "temperature": real(1.5)}
    plain, *drawn = (texts(url, model, **options) for options in ({}, *[{**sampled, "seed": seed_of(1)}] * 2))
    assert drawn[0] == drawn[1] != plain
    assert texts(url, model, length_penalty=real(2.0)) == plain
    penalties = {"repetition_penalty": real(1.5), "presence_penalty": real(1.0), "frequency_penalty": real(1.0)}
    assert texts(url, model, **penalties) != plain
    assert texts(url, model, end_id=integer(7042)) == ""
    assert texts(url, model, end_id=integer(7042), min_tokens=integer(NUM_TOKENS)) not in ("", plain)


@row("ensemble", "num_return_sequences: a response a sequence, with sequence_index")
def test_the_ensembles_sequences(url: str) -> None:
    options = {"num_return_sequences": integer(2), "top_k": integer(50)}
    results = stream(url, "ensemble", text_request(PROMPT, 3, False, **options))
    assert sorted(result.as_numpy("sequence_index").tolist() for result in results) == [[[0]], [[1]]]


@row("ensemble", "beam_width over 1: a text a beam in one response")
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_the_text_of_beams(url: str, model: str) -> None:
    (result,) = stream(url, model, text_request(PROMPT, 3, False, beam_width=integer(2), length_penalty=real(1.0)))
    assert result.as_numpy("text_output").shape == (2,)
    assert len(set(result.as_numpy("text_output"))) == 2


@row("ensemble", "decoder texts and prompt tables", "refused")
def test_the_ensemble_refuses_what_it_does_not_do(url: str) -> None:
    assert_refused(url, "ensemble", text_request(PROMPT, 1, True))


# tensorrt_llm_bls


@row("tensorrt_llm_bls", "every input and output is declared, with upstream's names, types and shapes")
def test_the_bls_model_declares_all_tensors(url: str) -> None:
    assert_upstreams_tensors_are_declared(url, "tensorrt_llm_bls")


@row("tensorrt_llm_bls", "the same text as the ensemble, whole and streamed")
def test_the_bls_model_answers_as_the_ensemble_does(url: str) -> None:
    for streaming in (True, False):
        assert texts(url, "tensorrt_llm_bls", streaming) == texts(url, "ensemble", streaming)


@row("tensorrt_llm_bls", "stop_words on text, across tokens; bad_words, embedding_bias_words and their weights")
def test_the_bls_models_words(url: str) -> None:
    assert_words_count(url, "tensorrt_llm_bls")


@row("tensorrt_llm_bls", "top_k, top_p, temperature, seed, end_id, min_tokens, penalties and length_penalty")
def test_the_bls_models_options(url: str) -> None:
    assert_options_count(url, "tensorrt_llm_bls")


@row("tensorrt_llm_bls", "images, videos, draft tokens, decoder texts and prompt tables", "refused")
def test_the_bls_model_refuses_what_it_does_not_do(url: str) -> None:
    assert_refused(url, "tensorrt_llm_bls", text_request(PROMPT, 1, True))
