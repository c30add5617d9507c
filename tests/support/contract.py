"""The tensors of upstream's Triton models, as their config.pbtxt files declare them, in a short form of our own.

Most are of TensorRT-LLM's `inflight_batcher_llm`. `llmapi` is the model `tensorrt_llm` of NVIDIA's later recipe, and
`vllm_model` one of Triton's vLLM backend: these two have no batch dimension.

    INT32[1] a b; FP32[-1,-1] c        a and b are of shape [1], c is a matrix

The batch dimension is not in the shapes. REQUIRED names the inputs that a client must send there; all others are
optional. Where the type is a hole in upstream's template, its usual filling stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tritonclient.grpc import model_config_pb2

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]
"""name -> (type, shape)"""


def parse(text: str) -> Tensors:
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for group in text.split(";"):
        kind, *names = group.split()
        dtype, _, dims = kind.removesuffix("]").partition("[")
        tensors |= {name: (dtype, tuple(map(int, dims.split(",")))) for name in names}
    return tensors


_PERF_OUTPUTS = """;
    INT32[1] kv_cache_alloc_new_blocks kv_cache_reused_blocks kv_cache_alloc_total_blocks;
    INT64[1] arrival_time_ns first_scheduled_time_ns first_token_time_ns last_token_time_ns;
    FP32[1] acceptance_rate; INT32[1] total_accepted_draft_tokens total_draft_tokens;
    INT32[1] num_input_tokens num_output_tokens
"""

_TEXT_INPUTS = """
    STRING[1] text_input decoder_text_input; INT32[1] max_tokens num_return_sequences;
    STRING[-1] bad_words stop_words; BOOL[1] exclude_input_in_output;
    INT32[1] end_id pad_id top_k min_tokens beam_width;
    FP32[1] top_p temperature length_penalty repetition_penalty presence_penalty frequency_penalty;
    UINT64[1] seed; BOOL[1] return_log_probs return_context_logits return_generation_logits return_perf_metrics;
    BOOL[1] return_num_input_tokens return_num_output_tokens return_kv_cache_reuse_stats stream;
    FP16[-1,-1] prompt_embedding_table; UINT64[1] prompt_table_extra_id; INT32[1] prompt_vocab_size;
    STRING[-1] embedding_bias_words; FP32[-1] embedding_bias_weights;
    UINT64[1] lora_task_id; FP16[-1,-1] lora_weights; INT32[-1,3] lora_config;
    STRING[1] guided_decoding_guide_type guided_decoding_guide
"""

_TEXT_OUTPUTS = (
    """
    STRING[-1] text_output; FP32[-1] cum_log_probs; FP32[-1,-1] output_log_probs context_logits;
    FP32[-1,-1,-1] generation_logits; INT32[1] batch_index sequence_index
"""
    + _PERF_OUTPUTS
)

INPUTS: Mapping[str, Tensors] = {
    "preprocessing": parse("""
        STRING[1] QUERY; INT32[1] REQUEST_OUTPUT_LEN; STRING[1] DECODER_QUERY;
        UINT8[-1,-1,-1,-1] IMAGE_BYTES VIDEO_BYTES; STRING[1] IMAGE_URL;
        STRING[-1] IMAGES BAD_WORDS_DICT STOP_WORDS_DICT EMBEDDING_BIAS_WORDS;
        FP32[-1] EMBEDDING_BIAS_WEIGHTS; INT32[1] END_ID PAD_ID; UINT64[1] PROMPT_TABLE_EXTRA_ID
    """),
    "tensorrt_llm": parse("""
        INT32[1] input_lengths request_output_len; INT32[-1] input_ids;
        INT32[1] num_return_sequences decoder_input_lengths end_id pad_id beam_width runtime_top_k;
        INT32[1] runtime_top_p_reset_ids min_tokens prompt_vocab_size encoder_output_lengths;
        INT32[1] lookahead_window_size lookahead_ngram_size lookahead_verification_set_size;
        INT32[1] retention_decode_priority retention_decode_duration_ms;
        FP32[1] temperature runtime_top_p runtime_top_p_min runtime_top_p_decay len_penalty repetition_penalty;
        FP32[1] beam_search_diversity_rate presence_penalty frequency_penalty draft_acceptance_threshold;
        UINT64[1] seed lora_task_id; BOOL[1] early_stopping return_log_probs return_context_logits;
        BOOL[1] return_generation_logits return_perf_metrics return_num_input_tokens return_num_output_tokens;
        BOOL[1] return_kv_cache_reuse_stats;
        BOOL[1] exclude_input_in_output stop streaming skip_cross_attn_blocks;
        STRING[1] guided_decoding_guide_type guided_decoding_guide;
        INT32[-1] draft_input_ids decoder_input_ids; FP32[-1,-1] draft_logits;
        INT32[2,-1] stop_words_list bad_words_list; FP32[-1] embedding_bias; FP16[-1,-1] prompt_embedding_table;
        UINT64[-1] prompt_table_extra_ids; BOOL[-1,-1] cross_attention_mask; FP16[-1,-1] encoder_input_features;
        FP32[-1] mrope_rotary_cos_sin; INT64[1] mrope_position_deltas; UINT8[-1] context_phase_params;
        INT32[-1] retention_token_range_starts retention_token_range_ends retention_token_range_priorities;
        INT32[-1] retention_token_range_durations_ms; FP16[-1,-1] lora_weights; INT32[-1,3] lora_config
    """),
    "postprocessing": parse("INT32[-1,-1] TOKENS_BATCH; INT32[-1] SEQUENCE_LENGTH"),
    "ensemble": parse(_TEXT_INPUTS),
    "tensorrt_llm_bls": parse(
        _TEXT_INPUTS
        + """; FP16[-1,3,-1,-1] image_input; UINT8[-1,-1,-1,-1] image_bytes_input video_bytes_input;
        STRING[1] image_url_input; INT32[1] num_draft_tokens; BOOL[1] use_draft_logits"""
    ),
    "llmapi": parse("""
        STRING[-1] text_input image_url sampling_param_stop; BOOL[1] streaming stop;
        INT32[1] sampling_param_best_of sampling_param_top_k sampling_param_max_tokens;
        FP32[1] sampling_param_temperature sampling_param_top_p sampling_param_frequency_penalty;
        FP32[1] sampling_param_presence_penalty; UINT64[1] sampling_param_seed lora_id;
        BOOL[1] sampling_param_exclude_input_from_output sampling_param_return_perf_metrics;
        BOOL[1] return_finish_reason return_stop_reason return_cumulative_logprob;
        STRING[1] lora_name lora_path lora_ckpt_source sampling_param_logits_post_processor_name
    """),
    "vllm_model": parse("""
        STRING[1] text_input sampling_parameters embedding_request; STRING[-1] image; BOOL[1] stream;
        BOOL[1] exclude_input_in_output return_finish_reason return_cumulative_logprob return_logprobs;
        BOOL[1] return_num_input_tokens return_num_output_tokens
    """),
}

OUTPUTS: Mapping[str, Tensors] = {
    "preprocessing": parse("""
        INT32[-1] INPUT_ID; INT32[1] REQUEST_INPUT_LEN; INT32[-1] DECODER_INPUT_ID; INT32[1] REQUEST_DECODER_INPUT_LEN;
        INT32[2,-1] BAD_WORDS_IDS STOP_WORDS_IDS; FP32[-1] EMBEDDING_BIAS; INT32[-1] REQUEST_OUTPUT_LEN;
        INT32[1] OUT_END_ID OUT_PAD_ID; UINT64[-1] OUT_PROMPT_TABLE_EXTRA_IDS; FP16[-1,-1,-1,-1] PIXEL_VALUES;
        INT64[-1] ASPECT_RATIO_IDS; INT64[-1,-1] ASPECT_RATIO_MASK; INT64[-1,-1,-1] CROSS_ATTENTION_MASK;
        INT64[-1,2] IMAGE_SIZES; BOOL[1] IS_VIDEO_INPUT; INT64[-1] ATTENTION_MASK; INT64[3] IMAGE_GRID_THW;
        INT32[-1] VISION_INPUT_ID
    """),
    "tensorrt_llm": parse(
        """
        INT32[-1,-1] output_ids; INT32[-1] sequence_length; FP32[-1] cum_log_probs; FP32[-1,-1] output_log_probs;
        FP32[-1,-1] context_logits; FP32[-1,-1,-1] generation_logits; INT32[1] batch_index sequence_index;
        UINT8[-1] context_phase_params
    """
        + _PERF_OUTPUTS
    ),
    "postprocessing": parse("STRING[-1] OUTPUT"),
    "ensemble": parse(_TEXT_OUTPUTS),
    "tensorrt_llm_bls": parse(_TEXT_OUTPUTS),
    "llmapi": parse("""
        STRING[-1] text_output finish_reason stop_reason; FP32[-1] cumulative_logprob kv_cache_hit_rate;
        INT32[-1] kv_cache_reused_block kv_cache_missed_block kv_cache_alloc_new_blocks kv_cache_alloc_total_blocks;
        INT64[1] arrival_time_ns first_scheduled_time_ns first_token_time_ns last_token_time_ns;
        FP32[1] acceptance_rate; INT32[1] total_accepted_draft_tokens total_draft_tokens
    """),
    "vllm_model": parse("""
        STRING[-1] text_output finish_reason logprobs; FP32[-1] cumulative_logprob; UINT32[1] num_input_tokens;
        UINT32[-1] num_output_tokens
    """),
}

REQUIRED: Mapping[str, frozenset[str]] = {
    "preprocessing": frozenset({"QUERY", "REQUEST_OUTPUT_LEN"}),
    "tensorrt_llm": frozenset({"input_ids", "input_lengths", "request_output_len"}),
    "postprocessing": frozenset({"TOKENS_BATCH", "SEQUENCE_LENGTH"}),
    "ensemble": frozenset({"text_input", "max_tokens"}),
    "tensorrt_llm_bls": frozenset({"text_input", "max_tokens"}),
    "llmapi": frozenset({"text_input"}),
    "vllm_model": frozenset({"text_input"}),
}


def misfits(declared: Any, upstream: Tensors) -> list[str]:
    """The tensors of a config's `input` or `output` whose type or shape is not upstream's; missing ones, too.

    A dimension of ours may be free where upstream's has a size.
    """
    ours = {tensor.name: tensor for tensor in declared}
    found = []
    for name, (dtype, dims) in upstream.items():
        if name not in ours:
            found.append(f"{name} is missing")
            continue
        tensor = ours[name]
        fits = len(tensor.dims) == len(dims) and all(a in (b, -1) for a, b in zip(tensor.dims, dims, strict=True))
        if tensor.data_type != model_config_pb2.DataType.Value(f"TYPE_{dtype}") or not fits:
            found.append(f"{name} is {model_config_pb2.DataType.Name(tensor.data_type)}{list(tensor.dims)}")
    return found


_FLAT = frozenset({"text_output", "OUTPUT"})
"""Outputs without a batch dimension."""


def response_misfits(response: Any, model: str) -> list[str]:
    """The outputs of a response of gRPC that upstream's model of this name would give another type or shape, and
    output_ids where it is not the first: upstream's clients read it by its place.
    """
    declared, late = OUTPUTS.get(model, {}), [output.name for output in response.outputs[1:]]
    found = [f"{name} is not the first output" for name in late if name == "output_ids"]
    for output in response.outputs:
        if output.name in declared and not _fits(output, *declared[output.name]):
            found.append(f"{output.name} is {output.datatype}{list(output.shape)}")
    return found


def _fits(output: Any, dtype: str, dims: tuple[int, ...]) -> bool:
    shape = dims if output.name in _FLAT else (-1, *dims)
    has_shape = len(shape) == len(output.shape) and all(a in (b, -1) for a, b in zip(shape, output.shape, strict=True))
    return has_shape and output.datatype == {"STRING": "BYTES"}.get(dtype, dtype)
