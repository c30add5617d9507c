"""Parameters of config.pbtxt: the values that are read or refused, and that the message says what to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from multilora_engine.config import EngineConfig, idle_parameters, on_device, parameter_descriptions
from multilora_engine.errors import ConfigError


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def test_empty_values_and_unset_references_mean_the_default(checkpoint: str) -> None:
    parameters = {"model_path": "${MODEL}", "max_num_seqs": "", "dtype": "${UNSET}", "max_loras": " "}
    config = EngineConfig.from_parameters(parameters, environ={"MODEL": checkpoint})
    assert config == EngineConfig(model_path=Path(checkpoint))


def test_values_are_read_in_their_types(checkpoint: str) -> None:
    config = EngineConfig.from_parameters(
        {
            "model_path": checkpoint,
            "lora_cache_host_memory_bytes": "4GiB",
            "kv_cache_memory_bytes": "1000000",
            "add_special_tokens": "false",
            "max_loras": "7",
            "request_timeout_s": "1.5",
        },
        environ={},
    )
    assert config.lora.lora_cache_host_memory_bytes == 4 << 30
    assert config.kv_cache_memory_bytes == 1_000_000
    assert config.add_special_tokens is False
    assert config.lora.max_loras == 7
    assert config.request_timeout_s == 1.5


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"max_lora": "3"}, r"unknown parameter max_lora, did you mean max_loras or .*\? \(docs"),
        ({"zzz": "3"}, r"^unknown parameter zzz \(docs/configuration.md"),
        ({"max_num_seqs": "x"}, "parameter max_num_seqs='x'"),
        ({"max_lora_rank": "257"}, "parameter max_lora_rank='257'.*256"),
        ({"lora_on_conflict": "ignore"}, "lora_on_conflict='ignore'.*'refuse' or 'replace'"),
        ({"lora_dtype": "int2"}, "lora_dtype='int2': .*'bfloat16'.*'int8', 'fp8' or 'int4'"),
        ({"gpu_memory_utilization": "nan"}, "gpu_memory_utilization"),
        (
            {"max_num_seqs": "600", "max_num_batched_tokens": "256"},
            "max_num_seqs: 600 .*write max_num_seqs <= max_num_batched_tokens",
        ),
        ({"model_path": "/nowhere"}, "model_path: /nowhere is not there; give the directory"),
        ({"tokenizer_path": "/nowhere"}, "tokenizer_path: /nowhere is no directory"),
        ({"max_queue_size": "9" * 20}, f"max_queue_size: {'9' * 20} is beyond 4611686018427387904; write a smaller"),
        ({"lora_max_adapter_bytes": "9" * 20}, "lora_max_adapter_bytes: .* is beyond"),
        ({"num_threads": "100000"}, "parameter num_threads='100000'.*1024"),
        ({"engine_hang_timeout_s": "0.1"}, "engine_hang_timeout_s: 0.1 s are shorter .*; write 1 or more, or 0"),
        (
            {"kv_cache_memory_bytes": "4 lots"},
            "^parameter kv_cache_memory_bytes='4 lots': write bytes, or a size like 4GiB$",
        ),
        ({"enable_prefix_caching": "maybe"}, "^parameter enable_prefix_caching='maybe': write true or false$"),
        (
            {"inter_token_latency_target_ms": "perhaps"},
            "^parameter inter_token_latency_target_ms='perhaps': Input should be 'auto', or write a number$",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(checkpoint: str, parameters: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_parameters({"model_path": checkpoint, **parameters}, environ={})


def test_a_missing_model_is_told_first(checkpoint: str) -> None:
    with pytest.raises(ConfigError, match="model_path is empty"):
        EngineConfig.from_parameters({"model_path": "${MULTILORA_MODEL}"}, environ={})


def test_the_docs_list_every_parameter_with_its_default_and_meaning() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    table = page.split("<!-- parameters: begin -->\n")[1].split("<!-- parameters: end -->")[0]
    rows = [
        f"| `{name}` | {f'`{_shown(default)}`' if default not in (None, '') else ''} | {meaning} |"
        for name, (default, meaning) in parameter_descriptions().items()
    ]
    assert table.splitlines()[2:] == rows


def _shown(default: object) -> str:
    """As one writes it in config.pbtxt."""
    return str(default).lower() if isinstance(default, bool) else str(default)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("max_words_per_request", "4096"),
        ("max_beam_width", "8 beams"),
        ("max_prompt_bytes", "4 MiB"),
        ("enable_cuda_graphs", "pass the self-test at start"),
        ("block_size", "16 tokens on a CPU, 64 on a GPU"),
        ("allow_slow_operators", "stops the load"),
        ("unpacked_weights", "switches modules while the server runs"),
        ("unpacked_weights_memory_bytes", "the memory that all else leaves"),
    ],
)
def test_a_parameter_of_earlier_versions_is_refused_with_what_the_server_does_now(name: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=rf"parameter {name} is gone: .*{advice}; remove it from config.pbtxt"):
        EngineConfig.from_parameters({"model_path": "/m", name: "7"})


@pytest.mark.parametrize(
    ("device", "options", "expected"),
    [
        ("cpu", {}, (256, 32, 16)),
        ("cuda", {}, (2048, 64, 64)),
        ("cuda:1", {"max_num_seqs": 5}, (2048, 5, 64)),
        ("cpu", {"max_num_seqs": 300}, (300, 32, 16)),
        ("cuda", {"max_num_seqs": 4000, "block_size": 16}, (4000, 4000, 16)),
        ("cuda", {"max_num_batched_tokens": 100, "lora": {"max_loras": 3}}, (100, 3, 64)),
        ("cpu", {"max_num_batched_tokens": 100, "lora": {"max_loras": 3, "max_lora_rank": 8}}, (100, 3, 16)),
    ],
)
def test_what_is_written_stays_and_what_is_not_depends_on_the_device(
    tmp_path: Path, device: str, options: dict[str, object], expected: tuple[int, int, int]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = EngineConfig.model_validate({"model_path": tmp_path, "max_num_seqs": 64, **options})
    resolved = on_device(config, device)
    assert (resolved.max_num_batched_tokens, resolved.lora.max_loras, resolved.block_size) == expected
    assert resolved.max_num_encoder_tokens == resolved.max_num_batched_tokens
    numbers = {
        "max_num_batched_tokens": True,
        "max_num_encoder_tokens": True,
        "lora": {"max_loras"},
        "block_size": True,
        "enable_async_scheduling": True,
        "enable_cuda_graphs": True,
    }
    assert resolved.model_dump(exclude=numbers) == config.model_dump(exclude=numbers)


@pytest.mark.parametrize(
    ("device", "written", "expected"),
    [
        ("cpu", {}, (False, False)),
        ("cuda", {}, ("auto", True)),
        ("cuda", {"enable_cuda_graphs": False, "enable_async_scheduling": False}, (False, False)),
        ("cuda:1", {"enable_cuda_graphs": True, "enable_async_scheduling": True}, (True, True)),
        ("cpu", {"enable_async_scheduling": True}, (False, True)),
    ],
)
def test_graphs_and_asynchronous_steps_are_a_gpus_unless_they_are_written(
    tmp_path: Path, device: str, written: dict[str, bool], expected: tuple[object, bool]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = EngineConfig.model_validate({"model_path": tmp_path, **written})
    resolved = on_device(config, device)
    assert (resolved.enable_cuda_graphs, resolved.enable_async_scheduling) == expected


@pytest.mark.parametrize("written", [True, "auto", False])
def test_cuda_graphs_cannot_be_demanded_of_a_cpu(tmp_path: Path, written: object) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = EngineConfig.model_validate({"model_path": tmp_path, "enable_cuda_graphs": written})
    if written is True:
        with pytest.raises(ConfigError, match="enable_cuda_graphs=true: the CPU serves"):
            on_device(config, "cpu")
    else:
        assert on_device(config, "cpu").enable_cuda_graphs is False


def test_shares_of_a_gpu_s_memory_that_are_written_for_a_cpu_are_told(checkpoint: str) -> None:
    written = {"gpu_memory_utilization": "0.8", "lora_cache_gpu_memory_fraction": "0.25", "num_threads": "2"}
    for parameters, told in (
        (written, ["gpu_memory_utilization=0.8", "lora_cache_gpu_memory_fraction=0.25"]),
        ({"gpu_memory_utilization": "0.90", "lora_cache_gpu_memory_fraction": "0"}, []),
    ):
        config = EngineConfig.from_parameters({"model_path": checkpoint, **parameters}, environ={})
        assert idle_parameters(config) == told


@pytest.mark.parametrize("text", ["attn_q,moe_gate", " attn_q, moe_gate ", "attn_q moe_gate"])
def test_modules_are_listed_by_commas_or_spaces(checkpoint: str, text: str) -> None:
    config = EngineConfig.from_parameters({"model_path": checkpoint, "lora_target_modules": text}, environ={})
    assert config.lora.target_modules == ["attn_q", "moe_gate"]
    assert EngineConfig.from_parameters({"model_path": checkpoint}, environ={}).lora.target_modules == []
