"""The door `vllm_model`: the names, shapes and types of the tensors of Triton's vLLM backend.

They have no batch dimension. The options of an answer, and the name of its adapter, are vLLM's sampling parameters: one
JSON object in a tensor, or the parameters of the request. Values may be strings, as vLLM's own client sends them. A
parameter that is unknown or cannot be kept is refused by its name. Responses of a stream have new text only. Source:
`src/model.py` and `src/utils` of vllm_backend; `SamplingParams` of vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from multilora_engine.engine_info import EngineInfo
from multilora_engine.errors import InvalidRequest, Unsupported
from multilora_engine.serving.front import EngineLink
from multilora_engine.serving.generation_front import GenerationFront, transcripts_of
from multilora_engine.serving.inputs import InputTensors
from multilora_engine.serving.outputs import ReplyRow, RowAnswer
from multilora_engine.serving.replies import OneReply, Reply, Responder
from multilora_engine.serving.request_parser import GenerateCall
from multilora_engine.serving.structured_outputs import StructuredOutputs, read_guide
from multilora_engine.serving.token_lists import write_sequences
from multilora_engine.serving.triton_api import TritonRequest, typed_parameters_of
from multilora_engine.serving.unsupported import (
    HARMLESS_PARAMETERS,
    is_of_adapters,
    is_of_triton,
    means_nothing,
    refuse_other_models,
    refuse_unsupported,
)
from multilora_engine.text.tokenizer import Tokenizer

_NUM_SEEDS = 1 << 64
_MAX_BIAS = 100.0
"""vLLM cuts larger biases to this."""

_Probability = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class VllmSampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's sampling parameters that this server keeps, with vLLM's defaults, and the adapter's name and digest.

    max_tokens None: up to the end of the context. top_k 0 and -1: no restriction. seed None and -1: none.
    logprobs: how many of the likeliest tokens beside each token of the answer; 0: the token alone.
    """

    n: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)] = 1
    max_tokens: _Count | None = 16
    min_tokens: _Count = 0
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)] = 0
    min_p: _Probability = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    stop: str | list[str] | None = None
    stop_token_ids: list[_Count] | None = None
    bad_words: list[str] | None = None
    logit_bias: dict[_Count, float] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: _Count | None = None
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)] | None = None
    structured_outputs: str | StructuredOutputs | None = None
    lora_name: str | None = None
    lora_expected_digest: str | None = None
    lora_session: str | None = None


_SAME_ANSWER: Mapping[str, frozenset[str]] = {
    "best_of": frozenset({"1"}),
    "detokenize": frozenset({"true", "1"}),
    "early_stopping": frozenset({"false"}),
    "length_penalty": frozenset({"1", "1.0"}),
    "output_kind": frozenset({"0"}),
    "skip_reading_prefix_cache": frozenset({"true", "false"}),
    "skip_special_tokens": frozenset({"true", "1"}),
    "spaces_between_special_tokens": frozenset({"true", "false"}),
    "use_beam_search": frozenset({"false"}),
}
"""Parameters of vLLM's that this server has one answer to, and the values that ask for it, in lower case."""

_UNSUPPORTED: Mapping[str, str] = {
    "allowed_token_ids": "send logit_bias",
    "best_of": "this server chooses no best of several answers; send n",
    "detokenize": "this model answers with text",
    "early_stopping": "the model generation has beam search",
    "length_penalty": "the model generation has beam search",
    "logits_processors": "this server runs no code of clients",
    "output_kind": "the input stream chooses between new text and the whole answer",
    "prompt_logprobs": "this protocol has no output for them; the model generation has",
    "skip_special_tokens": "the text of an answer never shows special tokens",
    "thinking_token_budget": "this server counts all tokens of an answer alike; send max_tokens",
    "use_beam_search": "the model generation has beam search",
}
"""Parameters of vLLM's that this server cannot keep, and what to do instead."""

_INPUTS = ("stream", "streaming")
_FLAGS = (
    "return_finish_reason",
    "return_cumulative_logprob",
    "return_logprobs",
    "return_num_input_tokens",
    "return_num_output_tokens",
)


class VllmFront(GenerationFront):
    """The front of this door. The one request that it makes of a client's is that of `generation`."""

    def __init__(self, link: EngineLink, can_stream: bool) -> None:
        super().__init__(link, can_stream, make_responder=VllmResponder)

    def _read_inputs(
        self, request: TritonRequest, responder: Responder, info: EngineInfo, tokenizer: Tokenizer
    ) -> InputTensors:
        assert isinstance(responder, VllmResponder)
        inputs = InputTensors(request)
        refuse_unsupported(inputs)
        own = typed_parameters_of(request, info.limits.max_metadata_bytes)
        refuse_other_models(own, self._link.names_of_no_adapter(info), "sampling_parameters, with lora_name in it")
        try:
            given = _given_parameters(_text(inputs, "sampling_parameters"), own, info.limits.max_metadata_bytes)
            sampling = read_vllm_sampling(given)
        except RecursionError:
            raise InvalidRequest("sampling parameters are nested too deep") from None
        prompt = _text(inputs, "text_input") or ""
        is_streaming = bool(_scalar(inputs, "stream"))
        if is_streaming and sampling.n > 1:
            raise Unsupported(f"n {sampling.n} together with stream; send stream false, or n requests")
        if _prepends_prompt(inputs, is_streaming):
            responder.prefix = prompt if info.source is None else ""  # an answer follows no source
        responder.told = {flag for flag in _FLAGS if _scalar(inputs, flag)}
        responder.num_top = sampling.logprobs
        arrays = tensors_of(sampling, info, tokenizer)
        if "return_cumulative_logprob" in responder.told:
            arrays["return_log_probs"] = np.array([[True]])
        texts = np.array([[prompt.encode()]], np.object_)
        return InputTensors.of({**arrays, "text_input": texts, "streaming": np.array([[is_streaming]])})

    def _reply(
        self, call: GenerateCall, rows: Mapping[str, ReplyRow], responder: Responder, tokenizer: Tokenizer
    ) -> Reply:
        rows = {
            request_id: msgspec.structs.replace(row, token_bytes=tokenizer.spell if row.token_bytes else None)
            for request_id, row in rows.items()
        }
        if call.is_streaming:
            return super()._reply(call, rows, responder, tokenizer)
        # One response has all answers, also of a model that could send several.
        return OneReply(responder, transcripts_of(call, rows, responder, tokenizer), call.pad_id, call.num_sequences)


def _prepends_prompt(inputs: InputTensors, is_streaming: bool) -> bool:
    excludes_prompt = _scalar(inputs, "exclude_input_in_output")
    if is_streaming and excludes_prompt is not None and not excludes_prompt:
        raise InvalidRequest("When streaming, `exclude_input_in_output` = False is not allowed.")
    return not (is_streaming or excludes_prompt)


def _given_parameters(text: str | None, own: Sequence[tuple[str, Any]], max_bytes: int) -> dict[str, Any]:
    """The sampling parameters of a request by name.

    text: of the tensor, None without one. own: the request's parameters, which count without the tensor. Beside the
    tensor they must repeat it: another value could have been meant. Raises InvalidRequest.
    """
    parameters: dict[str, Any] = {}
    for name, value in own:
        if name.lower() in _INPUTS and not means_nothing([value]):
            raise InvalidRequest(f"{name} is a parameter of the request; this model has it as the input stream")
        if name.lower() in HARMLESS_PARAMETERS or is_of_triton(name):
            continue
        if name in parameters and parameters[name] != value:
            raise InvalidRequest(f"{name} is {parameters[name]!r} and {value!r} among the parameters of the request")
        parameters[name] = value
    if text is None:
        return parameters
    if (num_bytes := len(text.encode())) > max_bytes:
        raise InvalidRequest(f"sampling_parameters has {num_bytes} bytes; a request may have {max_bytes}")
    try:
        given = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise InvalidRequest(
            f"sampling_parameters must be a JSON object of vLLM's sampling parameters: {error}"
        ) from None
    for name, value in parameters.items():
        if name not in given or str(given[name]) != str(value):
            raise InvalidRequest(
                f"{name} is {value!r} among the parameters of the request and {given.get(name)!r} in "
                "sampling_parameters; send it in one of them"
            )
    return given


def read_vllm_sampling(given: Mapping[str, Any]) -> VllmSampling:
    """Sampling parameters as values of their types. Raises InvalidRequest or Unsupported, naming the parameter."""
    known = set(VllmSampling.__struct_fields__)
    kept = {}
    for name, value in given.items():
        if name in known:
            if value is not None or name == "max_tokens":
                kept[name] = value
        elif is_of_adapters(name):
            raise InvalidRequest(f"{name} is no sampling parameter that chooses an adapter; send lora_name")
        elif value is None or str(value).lower() in _SAME_ANSWER.get(name, ()):
            continue
        elif name in _UNSUPPORTED:
            raise Unsupported(f"sampling parameter {name} {value!r}: {_UNSUPPORTED[name]}")
        elif not means_nothing([value]):
            raise InvalidRequest(f"{name} is not a sampling parameter that this model knows; leave it out")
    try:
        return msgspec.convert(kept, VllmSampling, strict=False, str_keys=True)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"sampling parameters cannot be read: {error}") from None


def tensors_of(sampling: VllmSampling, info: EngineInfo, tokenizer: Tokenizer) -> dict[str, NDArray[Any]]:
    """The tensors of `generation` that ask for the same. Raises InvalidRequest, Unsupported."""
    max_tokens = info.max_model_len if sampling.max_tokens is None else sampling.max_tokens
    arrays = {
        "max_tokens": _integers(max_tokens),
        "min_tokens": _integers(sampling.min_tokens),
        "min_tokens_holds_stops": np.array([[True]]),
        "temperature": _floats(sampling.temperature),
        "runtime_top_k": _integers(max(0, sampling.top_k)),
        "runtime_top_p": _floats(sampling.top_p),
        "min_p": _floats(sampling.min_p),
        "presence_penalty": _floats(sampling.presence_penalty),
        "frequency_penalty": _floats(sampling.frequency_penalty),
        "repetition_penalty": _floats(sampling.repetition_penalty),
        "include_stop_str_in_output": np.array([[sampling.include_stop_str_in_output]]),
        # The responder puts the prompt before the answer as the client wrote it.
        "exclude_input_in_output": np.array([[True]]),
        "num_return_sequences": _integers(sampling.n),
    }
    if sampling.seed not in (None, -1):
        arrays["seed"] = np.array([[int(sampling.seed or 0) % _NUM_SEEDS]], np.uint64)
    if sampling.ignore_eos:
        arrays["end_id"] = _integers(-1)
    stop_words = [sampling.stop] if isinstance(sampling.stop, str) else sampling.stop
    if stop_words:
        if "" in stop_words:
            raise InvalidRequest("stop cannot contain an empty string")
        arrays["stop_words"] = _texts(stop_words)
    if sampling.stop_token_ids:
        arrays["stop_words_list"] = write_sequences([tuple((token_id,) for token_id in sampling.stop_token_ids)])
    if sampling.bad_words:
        arrays["bad_words"] = _texts([s for word in sampling.bad_words for s in _spellings(word, tokenizer)])
    if sampling.logit_bias:
        arrays["embedding_bias_ids"] = _integers(*sampling.logit_bias)
        arrays["embedding_bias_weights"] = np.clip(_floats(*sampling.logit_bias.values()), -_MAX_BIAS, _MAX_BIAS)
    if sampling.logprobs is not None:
        arrays["return_log_probs"] = np.array([[True]])
        arrays["num_top_log_probs"] = _integers(
            max(1, sampling.logprobs)
        )  # tells, too, whether a token is the likeliest
    if sampling.truncate_prompt_tokens is not None:
        arrays["truncate_prompt_tokens"] = _integers(sampling.truncate_prompt_tokens)
    if sampling.lora_name is not None:
        arrays["lora_name"] = _texts([sampling.lora_name])
    if sampling.lora_expected_digest is not None:
        arrays["lora_expected_digest"] = _texts([sampling.lora_expected_digest])
    if sampling.lora_session is not None:
        arrays["lora_session"] = _texts([sampling.lora_session])
    return arrays | _guide_tensors(sampling.structured_outputs)


def _guide_tensors(options: str | StructuredOutputs | None) -> dict[str, NDArray[Any]]:
    if isinstance(options, str):
        try:
            options = msgspec.json.decode(options, type=StructuredOutputs)
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"structured_outputs cannot be read: {error}") from None
    guide = None if options is None else read_guide(options, "structured_outputs")
    if guide is None:
        return {}
    return {"guided_decoding_guide_type": _texts([guide.type]), "guided_decoding_guide": _texts([guide.text])}


def _spellings(bad_word: str, tokenizer: Tokenizer) -> list[str]:
    """The texts whose tokens vLLM bans for a bad word: the word itself, and with a space before it if that is one token
    sequence of the same length with another first token.
    """
    word = bad_word.lstrip()
    bare, spaced = tokenizer.encode_words([word, f" {word}"])
    return [word, f" {word}"] if bare[:1] != spaced[:1] and len(bare) == len(spaced) else [word]


def _integers(*values: int) -> NDArray[np.int64]:
    return np.array([values], np.int64)


def _floats(*values: float) -> NDArray[np.float64]:
    return np.array([values], np.float64)


def _texts(texts: Sequence[str]) -> NDArray[np.object_]:
    return np.array([[text.encode() for text in texts]], np.object_)


def _row(inputs: InputTensors, name: str) -> InputTensors:
    values = inputs.array(name)
    if values.size != 1:
        raise InvalidRequest(f"{name} has {values.size} values, expected one")
    return InputTensors.of({name: values.reshape(1, 1)})


def _scalar(inputs: InputTensors, name: str) -> Any:
    return _row(inputs, name).scalar(name, 0) if name in inputs else None


def _text(inputs: InputTensors, name: str) -> str | None:
    return _row(inputs, name).text(name, 0) if name in inputs else None


class VllmResponder(Responder):
    """Responses whose tensors have an element for each of the n answers.

    prefix: the text before each answer. told: the inputs that ask for outputs, beside the text. num_top: the number of
    likeliest tokens beside each token of the answer, None if the sampling parameters ask for no log-probs.
    """

    def __init__(self, request: TritonRequest) -> None:
        super().__init__(request)
        self.prefix = ""
        self.told: set[str] = set()
        self.num_top: int | None = None

    def respond(self, answers: Sequence[RowAnswer], pad_id: int, is_final: bool, num_sequences: int = 1) -> None:
        arrays: dict[str, NDArray[Any]] = {"text_output": _column([self.prefix + answer.text for answer in answers])}
        if "return_finish_reason" in self.told:
            arrays["finish_reason"] = _column([_finish_reason(answer) for answer in answers])
        if "return_cumulative_logprob" in self.told:
            arrays["cumulative_logprob"] = np.array([answer.cum_log_prob for answer in answers], np.float32)
        if "return_logprobs" in self.told:
            told = [None if self.num_top is None else _log_probs(answer, self.num_top) for answer in answers]
            arrays["logprobs"] = _column([json.dumps(log_probs) for log_probs in told])
        if "return_num_input_tokens" in self.told:
            arrays["num_input_tokens"] = np.array([answers[0].num_input_tokens], np.uint32)
        if "return_num_output_tokens" in self.told:
            arrays["num_output_tokens"] = np.array([len(answer.token_ids) for answer in answers], np.uint32)
        self._append_arrays(arrays, is_final)


def _column(texts: Sequence[str]) -> NDArray[np.object_]:
    return np.array([text.encode() for text in texts], np.object_)


def _finish_reason(answer: RowAnswer) -> str:
    return "abort" if answer.finish_reason == "cancelled" else answer.finish_reason or str(None)


def _log_probs(answer: RowAnswer, num_top: int) -> list[dict[int, dict[str, Any]]]:
    """For each new token: the token itself and the `num_top` likeliest ones, by id.

    The rank of a token that is not among the likeliest ones that the engine told is not known: it is null.
    """
    assert answer.log_probs is not None, "the request asked for them"
    assert answer.top_log_probs is not None
    assert answer.spelled is not None
    values = zip(answer.token_ids, answer.log_probs, answer.top_log_probs, answer.spelled, strict=True)
    return [_token_log_probs(token_id, log_prob, top, spelled, num_top) for token_id, log_prob, top, spelled in values]


def _token_log_probs(
    token_id: int, log_prob: float, top: Sequence[tuple[int, float]], spelled: Sequence[bytes], num_top: int
) -> dict[int, dict[str, Any]]:
    """spelled: the bytes of the token, then those of `top`."""
    texts = [token.decode("utf-8", "replace") for token in spelled]
    ranks = {top_id: rank for rank, (top_id, _) in enumerate(top, start=1)}
    told = {token_id: {"logprob": log_prob, "rank": ranks.get(token_id), "decoded_token": texts[0]}}
    for rank, ((top_id, top_log_prob), text) in enumerate(zip(top, texts[1:], strict=True), start=1):
        if rank <= num_top and top_id != token_id:
            told[top_id] = {"logprob": top_log_prob, "rank": rank, "decoded_token": text}
    return told
