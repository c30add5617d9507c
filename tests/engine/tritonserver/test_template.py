from __future__ import annotations

from pathlib import Path

import pytest

from multilora_engine.config import parameter_descriptions
from multilora_engine.errors import ConfigError
from multilora_engine.tritonserver.repository import find_model_repository, model_names, read_config
from multilora_engine.tritonserver.template import (
    IGNORED,
    RENAMED,
    copy_repository,
    fill,
    known_keys,
    parse_substitutions,
)
from multilora_engine.tritonserver.upstream_models import UpstreamModels, add_upstream_models

UPSTREAMS_KEYS = """
    tokenizer_dir add_special_tokens multimodal_model_path engine_dir max_num_images hf_model_path
    preprocessing_instance_count postprocessing_instance_count bls_instance_count skip_special_tokens
    accumulate_tokens tensorrt_llm_model_name tensorrt_llm_draft_model_name multimodal_encoders_name
    triton_backend triton_max_batch_size decoupled_mode max_queue_delay_microseconds max_queue_size
    batching_strategy encoder_engine_dir max_tokens_in_paged_kv_cache max_attention_window_size
    sink_token_length batch_scheduler_policy kv_cache_free_gpu_mem_fraction cross_kv_cache_fraction
    kv_cache_host_memory_bytes kv_cache_onboard_blocks enable_trt_overlap exclude_input_in_output
    cancellation_check_period_ms stats_check_period_ms iter_stats_max_iterations request_stats_max_iterations
    enable_kv_cache_reuse normalize_log_probs enable_chunked_context gpu_device_ids participant_ids num_nodes
    max_beam_width lora_cache_optimal_adapter_size lora_cache_max_adapter_size lora_cache_gpu_memory_fraction
    lora_cache_host_memory_bytes lora_prefetch_dir decoding_mode lookahead_window_size lookahead_ngram_size
    lookahead_verification_set_size medusa_choices eagle_choices gpu_weights_percent
    enable_context_fmha_fp32_acc multi_block_mode cuda_graph_mode cuda_graph_cache_size
    speculative_decoding_fast_logits guided_decoding_backend xgrammar_tokenizer_info_path logits_datatype
    encoder_input_features_data_type prompt_embedding_table_data_type visual_model_path tokenizer_type
    max_num_sequences context_model_name generation_model_name disaggregated_serving_bls_count n_mels zero_pad
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A copy of ours that may be written to."""
    copy_repository(find_model_repository(), tmp_path / "copy")
    return tmp_path / "copy"


def parameters(repository: Path) -> dict[str, str]:
    config = read_config(repository / "generation" / "config.pbtxt")
    return {name: parameter.string_value for name, parameter in config.parameters.items()}


def test_every_key_of_upstreams_templates_is_known(repository: Path) -> None:
    assert set(UPSTREAMS_KEYS.split()) <= set(known_keys())


def test_no_key_is_both_used_and_ignored() -> None:
    assert not set(IGNORED) & {*parameter_descriptions(), *RENAMED}
    assert set(RENAMED.values()) <= set(parameter_descriptions())


def test_parameters_are_filled_in_and_everything_else_stays(repository: Path) -> None:
    before = (repository / "generation" / "config.pbtxt").read_text()
    filling = fill(
        repository, parse_substitutions(r"lora_prefetch_dir:/a\,b,tokenizer_dir:/t:1,max_loras:,max_queue_size:7")
    )
    changed = {"lora_prefetch_dir": "/a,b", "tokenizer_path": "/t:1", "max_loras": "", "max_queue_size": "7"}
    after = (repository / "generation" / "config.pbtxt").read_text()
    assert parameters(repository) == parameters(find_model_repository()) | changed
    pairs = zip(before.splitlines(), after.splitlines(), strict=True)
    assert sum(old != new for old, new in pairs) == len(changed)
    assert filling.written["tokenizer_dir"] == "tokenizer_path of generation"
    assert filling.ignored == {}


def test_what_means_nothing_here_is_told_with_the_reason(repository: Path) -> None:
    filling = fill(repository, parse_substitutions("engine_dir:/e,max_queue_size:0,bls_instance_count:8"))
    assert filling.written == {}
    assert list(filling.ignored) == ["engine_dir", "max_queue_size", "bls_instance_count"]
    assert "no limit upstream" in filling.ignored["max_queue_size"]
    assert parameters(repository) == parameters(find_model_repository())


@pytest.mark.parametrize(
    "order", [("triton_max_batch_size:4", "decoupled_mode:False"), ("decoupled_mode:False", "triton_max_batch_size:4")]
)
def test_the_batch_size_is_that_of_all_models_that_take_several_rows(repository: Path, order: tuple[str, str]) -> None:
    fill(repository, parse_substitutions(",".join(order)))
    sizes = {name: read_config(repository / name / "config.pbtxt").max_batch_size for name in model_names(repository)}
    assert sizes.pop("adapters") == 1
    assert set(sizes.values()) == {4}
    assert {"tensorrt_llm", "tensorrt_llm_bls", "generation", "ensemble"} < set(sizes)


def test_decoupled_mode_makes_the_models_of_upstreams_names_and_makes_them_again(repository: Path) -> None:
    for value, expected in (("true", True), ("False", False)):
        fill(repository, parse_substitutions(f"decoupled_mode:{value},preprocessing_instance_count:3"))
        for name in ("tensorrt_llm", "tensorrt_llm_bls"):
            config = read_config(repository / name / "config.pbtxt")
            assert config.model_transaction_policy.decoupled == expected
        ensemble = read_config(repository / "ensemble" / "config.pbtxt").ensemble_scheduling
        assert [step.model_name for step in ensemble.step][1] == ("generation" if expected else "generation_unary")
    (group,) = read_config(repository / "preprocessing" / "config.pbtxt").instance_group
    assert group.count == 3
    with pytest.raises(ConfigError, match="has a model tensorrt_llm already"):
        add_upstream_models(repository, UpstreamModels.UNARY)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_que_size:1", "unknown parameter max_que_size, did you mean max_queue_size"),
        ("zzz:1", "unknown parameter zzz "),
        ("max_loras", "'max_loras' is no key:value"),
        (":1", "':1' is no key:value"),
        ("triton_max_batch_size:0", "triton_max_batch_size: '0' is not a number >= 1"),
        ("decoupled_mode:maybe", "decoupled_mode: 'maybe' is not true or false"),
        ('model_path:a"b', "cannot hold as it is"),
    ],
)
def test_what_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_substitutions(text)


def test_a_copy_never_overwrites(repository: Path) -> None:
    with pytest.raises(ConfigError, match="exists; give a directory that is to be made"):
        copy_repository(find_model_repository(), repository)


def test_a_file_that_is_not_ours_is_named(repository: Path) -> None:
    (repository / "generation" / "config.pbtxt").write_text('name: "generation"\n')
    with pytest.raises(ConfigError, match=r"generation/config\.pbtxt: it has no place for the value '9'"):
        fill(repository, {"max_loras": "9"})
