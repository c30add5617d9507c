"""Refuses requests for things that this server would otherwise leave out in silence.

Inputs of TensorRT-LLM's models that stand for features this server does not have are declared so that a client that
sends them is told of the feature. Triton refuses undeclared inputs by their names, but for those of HTTP generate and
generate_stream: it takes members of their JSON that are no inputs for parameters of the request. Those are taken that
change no answer; any other one could be another server's name of an adapter, a length or an option.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from multilora_engine.errors import InvalidRequest, Unsupported
from multilora_engine.serving.inputs import ENSEMBLE_NAMES, InputTensors
from multilora_wire.headers import CLIENT_HEADER, KEY_HEADER

_ENCODER = "encoder-decoder models"
_FEATURES = "models whose encoders take features"
_CROSS_MASKS = "masks of cross attention"
_PROMPT_TABLE = "prompt tables"
_IMAGES = "images or videos"
_DRAFT = "speculative decoding"
_RETENTION = "KV cache retention priorities"

UNSUPPORTED_OPTIONS: Mapping[str, str] = {
    "decoder_input_lengths": _ENCODER,
    "encoder_output_lengths": _FEATURES,
    "skip_cross_attn_blocks": _CROSS_MASKS,
    "decoder_text_input": _ENCODER,
    "DECODER_QUERY": f"{_ENCODER} (it is the ensemble's decoder_text_input)",
    "prompt_vocab_size": _PROMPT_TABLE,
    "prompt_table_extra_id": _PROMPT_TABLE,
    "PROMPT_TABLE_EXTRA_ID": f"{_PROMPT_TABLE} (it is the ensemble's prompt_table_extra_id)",
    "image": _IMAGES,
    "image_url": _IMAGES,
    "image_url_input": _IMAGES,
    "IMAGE_URL": _IMAGES,
    "draft_acceptance_threshold": _DRAFT,
    "num_draft_tokens": _DRAFT,
    "use_draft_logits": _DRAFT,
    "lookahead_window_size": _DRAFT,
    "lookahead_ngram_size": _DRAFT,
    "lookahead_verification_set_size": _DRAFT,
    "retention_decode_priority": _RETENTION,
    "retention_decode_duration_ms": _RETENTION,
    "sampling_param_logits_post_processor_name": "logits processors",
    "embedding_request": "embeddings",
}
"""Inputs whose values are options, with their purposes. False, 0 and the empty text ask for nothing."""

UNSUPPORTED_TENSORS: Mapping[str, str] = {
    "decoder_input_ids": _ENCODER,
    "encoder_input_features": _FEATURES,
    "cross_attention_mask": _CROSS_MASKS,
    "prompt_embedding_table": _PROMPT_TABLE,
    "prompt_table_extra_ids": _PROMPT_TABLE,
    "mrope_rotary_cos_sin": _IMAGES,
    "mrope_position_deltas": _IMAGES,
    "image_input": _IMAGES,
    "image_bytes_input": _IMAGES,
    "video_bytes_input": _IMAGES,
    "IMAGE_BYTES": _IMAGES,
    "VIDEO_BYTES": _IMAGES,
    "IMAGES": _IMAGES,
    "draft_input_ids": _DRAFT,
    "draft_logits": _DRAFT,
    "context_phase_params": "disaggregated prefill",
    "retention_token_range_starts": _RETENTION,
    "retention_token_range_ends": _RETENTION,
    "retention_token_range_priorities": _RETENTION,
    "retention_token_range_durations_ms": _RETENTION,
}
"""Other inputs, with their purposes. A tensor without elements asks for nothing."""


_PLACEHOLDERS = frozenset({"decoder_input_ids", "decoder_input_lengths"})
"""One token a row, and its length, ask for nothing: upstream's preprocessing gives them to every model."""

OF_THE_DECODER = _PLACEHOLDERS | {"decoder_text_input", "DECODER_QUERY"}
"""The beginning of the answer, which models with an encoder take."""


def refuse_unsupported(inputs: InputTensors, has_encoder: bool = False) -> None:
    """Raises Unsupported, naming the tensor, when a request asks for something that this server does not do.

    has_encoder: whether the model has one.
    """
    served = OF_THE_DECODER if has_encoder else frozenset()
    for name in inputs.present(*UNSUPPORTED_OPTIONS.keys() - served):
        if any(value > 1 if name in _PLACEHOLDERS else value for value in inputs.array(name).flat):
            raise _refusal(name, UNSUPPORTED_OPTIONS[name])
    for name in inputs.present(*UNSUPPORTED_TENSORS.keys() - served):
        values = inputs.array(name)
        if values.size > (len(values) if name in _PLACEHOLDERS else 0):
            raise _refusal(name, UNSUPPORTED_TENSORS[name])


_ADAPTER_WORDS = ("lora", "adapter")

_SAMPLING_NAMES = {theirs: ours for theirs, ours in ENSEMBLE_NAMES.items() if ours != "streaming"}
_OTHER_NAMES = {**_SAMPLING_NAMES, **{ours: theirs for theirs, ours in _SAMPLING_NAMES.items()}}
"""Without `streaming`, which upstream's gRPC clients also send as a parameter."""

ONLY_AT_GENERATION = frozenset(
    {
        "bad_words_list",
        "beam_search_diversity_rate",
        "early_stopping",
        "embedding_bias",
        "embedding_bias_ids",
        "guided_decoding_after_thinking",
        "min_tokens_holds_stops",
        "num_prompt_top_log_probs",
        "request_output_len",
        "return_prompt_log_probs",
        "stop",
        "stop_words_list",
    }
)
"""Inputs of `generation` that the ensembles do not have under any name."""

_NOTHING = frozenset({"false", "0", "0.0", "", "none", "null", "[]", "{}"})


def is_of_adapters(name: str) -> bool:
    """Whether a parameter of this name could be meant to choose an adapter."""
    return name.lower().startswith(_ADAPTER_WORDS)


def means_nothing(values: Iterable[object]) -> bool:
    """Whether the values ask for nothing, whatever they are of."""
    return all(str(value).lower() in _NOTHING for value in values)


HARMLESS_PARAMETERS: Mapping[str, str] = {
    CLIENT_HEADER: "who asks, by the proxy's word",
    KEY_HEADER: "who asks, by an API key",
    "streaming": "upstream's gRPC clients send it beside the input",
    "stream": "the same, under the ensemble's name",
    "model": "clients of several servers name the model in the body, too, which `refuse_other_models` reads",
    "model_name": "the same",
    "user": "a name for the client's own accounts",
    "id": "the request's id",
    "request_id": "the same",
    "priority": "Triton's own order of a queue that these models do not have",
    "timeout": "Triton's own, which the request tells by itself",
    "sequence_id": "Triton's own; no model here has state between requests",
    "sequence_start": "the same",
    "sequence_end": "the same",
    "binary_data_output": "the form of the answer, which Triton gives it",
    "headers": "Triton's own",
    "content_type": "the form of texts, by KServe's convention",
    "traceparent": "a trace that the request is part of",
    "tracestate": "the same",
    "baggage": "the same",
}
"""Parameters of requests, in lower case, that change no answer, and what they are."""

_OF_TRITON = "triton_"
"""Of the names that begin so Triton refuses those that it does not know."""


def is_of_triton(name: str) -> bool:
    """Whether a parameter of this name is for the server itself."""
    return name.lower().startswith(_OF_TRITON)


@dataclass(frozen=True)
class DoorNames:
    """The names that a door has for its inputs, where clients of other doors have others.

    adapter: the inputs that choose an adapter, in words. others: its names, by those of other doors. harmless: the
    parameters that change no answer, by their names in lower case.
    """

    adapter: str
    others: Mapping[str, str]
    harmless: Collection[str]


OUR_NAMES = DoorNames("lora_task_id or lora_name", _OTHER_NAMES, HARMLESS_PARAMETERS)
"""Those of `generation` and the ensembles."""


def refuse_lost_inputs(parameters: Mapping[str, list[str]], names: DoorNames = OUR_NAMES) -> None:
    """Raises InvalidRequest for a parameter that could have been meant for an input: one that chooses an adapter, in
    whose place the base model would answer, one that is an input of other models, and any that nobody here knows.

    parameters: the values of a request's parameters by name in lower case. names: of the door's inputs.
    """
    for name, values in parameters.items():
        if name in names.harmless or is_of_triton(name):
            continue
        if is_of_adapters(name):
            raise InvalidRequest(
                f"{name} is a parameter of the request, and these choose no adapter: send the input {names.adapter}"
            )
        if means_nothing(values):
            continue
        if name in names.others:
            raise InvalidRequest(
                f"{name} is a parameter of the request and no input of this model, which has it as {names.others[name]}"
            )
        if name in ONLY_AT_GENERATION:
            raise InvalidRequest(
                f"{name} is a parameter of the request and no input of this model; generation and generation_unary "
                "have it"
            )
        raise InvalidRequest(
            f"{name} is a parameter of the request and no input of this model: it would change nothing, so leave it "
            "out, or send the input that it stands for"
        )


def refuse_other_models(parameters: Iterable[tuple[str, object]], models: Collection[str], adapter: str) -> None:
    """Raises InvalidRequest for a `model` that may be meant as an adapter, in whose place the base model would answer.

    models: the names of Triton's models and of the base model, which change no answer. adapter: as of `DoorNames`.
    """
    for name, value in parameters:
        if name.lower() in ("model", "model_name") and not means_nothing([value]) and value not in models:
            raise InvalidRequest(
                f"{name} is {str(value)[:200]!r}, no model of this server, and a parameter of the request, which "
                f"chooses no adapter: send the input {adapter}, and leave {name} out"
            )


def _refusal(name: str, feature: str) -> Unsupported:
    return Unsupported(f"{name}: this server has no {feature}; leave the tensor out")
