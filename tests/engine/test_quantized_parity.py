"""Quantised checkpoints against transformers + PEFT over the same weights as floats: the same greedy tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoint_modules import checkpoint_modules
from support.compressed_checkpoints import save_compressed
from support.engines import run_all
from support.gptq_awq import (
    awq_tensors,
    fp8_tensors,
    gptq_config,
    gptq_tensors,
    in_layers,
    quantized,
    save_linears,
    stays_float,
)
from support.mixture_oracle import MixtureOracle, add_expert_adapters, make_engine
from support.mxfp4_checkpoints import save_mxfp4
from support.oracle import ATTENTION, Oracle
from support.parity import (
    TINY,
    add_random_adapters,
    assert_adapters_matter,
    assert_greedy,
    assert_nearly_greedy_in_bfloat16,
    assert_same_alone,
    build_engine,
    requests_for,
    tiny_prompts,
)
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from multilora_engine.config import EngineConfig
from multilora_engine.engine.engine import Engine
from multilora_engine.request import GenerationRequest, SamplingParams

NUM_PROMPTS = 24
Save = Callable[[Any, Path], None]
"""Writes a model, or its `checkpoint_modules`, quantised. Its weights are those of the codes, as floats, afterwards."""


@dataclass(frozen=True)
class Checkpoint:
    save: Save
    shape: dict[str, Any]


def integers(num_bits: int, symmetric: bool, group_size: int = 0, **more: Any) -> dict[str, Any]:
    """`weights` of a scheme; without a group size a scale an output."""
    grouped = {"strategy": "group", "group_size": group_size} if group_size else {"strategy": "channel"}
    return {"num_bits": num_bits, "type": "int", "symmetric": symmetric, **grouped, **more}


def fp8(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **more}


def scheme(weights: dict[str, Any], *targets: str, **more: Any) -> dict[str, Any]:
    return {"targets": targets or ["Linear"], "weights": weights, **more}


def compressed(
    shape: dict[str, Any], *schemes: dict[str, Any], ignore: Collection[str] = ("lm_head",), **options: Any
) -> Checkpoint:
    """As compressed-tensors writes it."""
    groups = {f"group_{i}": one for i, one in enumerate(schemes)}
    return Checkpoint(lambda model, path: save_compressed(model, path, groups, ignore=[*ignore], **options), shape)


def packed_by_hand(shape: dict[str, Any], config: dict[str, Any], store: Any) -> Checkpoint:
    """By the packers of the tests."""

    def save(model: Any, path: Path) -> None:
        path.mkdir()
        save_linears(path, model, config, store)

    return Checkpoint(save, shape)


def gptq(
    shape: dict[str, Any],
    bits: int,
    group_size: int,
    *,
    symmetric: bool = False,
    version: int = 1,
    order_seed: Callable[[str, torch.Tensor], int] | None = None,
) -> Checkpoint:
    """order_seed: of the random order in which a linear's inputs fall into groups; None: as they lie."""
    config = gptq_config(
        bits,
        group_size,
        sym=symmetric,
        desc_act=order_seed is not None,
        checkpoint_format="gptq" if version == 1 else "gptq_v2",
    )

    def codes(name: str, weight: torch.Tensor) -> Any:
        seed = 0 if order_seed is None else order_seed(name, weight)
        return quantized(weight, bits, group_size, symmetric=symmetric, act_order=order_seed is not None, seed=seed)

    return packed_by_hand(shape, config, in_layers(codes, partial(gptq_tensors, version=version)))


def awq(shape: dict[str, Any], group_size: int, symmetric: bool) -> Checkpoint:
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "zero_point": not symmetric,
        "version": "gemm",
    }

    def pack(codes: Any) -> dict[str, torch.Tensor]:
        tensors = awq_tensors(codes)
        if symmetric:
            del tensors["qzeros"]
        return tensors

    return packed_by_hand(shape, config, in_layers(lambda _, w: quantized(w, 4, group_size, symmetric=symmetric), pack))


def fine_grained_fp8(shape: dict[str, Any], block: list[int] | None) -> Checkpoint:
    """block: outputs and inputs that share a scale; None: all of a weight."""
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}
    return packed_by_hand(shape, config, lambda name, w: None if stays_float(name) else fp8_tensors(w, block))


FP8_PER_TOKEN = fp8("token", dynamic=True)
SEVERAL: dict[str, Checkpoint] = {
    "w4a16 in groups": compressed(TINY, scheme(integers(4, True, 8))),
    "w3a16 with zero points": compressed(TINY, scheme(integers(3, False))),
    "head and embeddings too": compressed(TINY, scheme(integers(8, False, 4), "Linear", "Embedding"), ignore=()),
    "blocks of FP8": compressed(TINY, scheme(fp8("block", block_structure=[16, 8]), input_activations=FP8_PER_TOKEN)),
    "q, k, v in different ways": compressed(
        TINY,
        scheme(integers(4, True, 8), "re:.*q_proj", "re:.*mlp.*"),
        scheme(integers(6, False, 12), "model.layers.1.self_attn.v_proj", "re:.*o_proj$"),
        ignore=["re:.*layers.2.*up_proj"],
    ),
    "GPTQ with inputs grouped by activations, the same groups for q, k and v": gptq(
        TINY | {"head_dim": 8}, 4, 8, order_seed=lambda _, w: w.shape[1]
    ),
    "GPTQ with inputs grouped by activations, other groups for each linear": gptq(
        TINY | {"head_dim": 8}, 4, 8, order_seed=lambda name, _: len(name)
    ),
    "AWQ": awq(TINY | {"head_dim": 8}, 8, symmetric=False),
}
EVEN = TINY | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 32,
}
"""Groups of 32 and 128, and words, divide all inputs."""

RAGGED_WORDS = EVEN | {"hidden_size": 42, "intermediate_size": 90, "num_attention_heads": 6, "head_dim": 14}
"""No row of codes is whole words, in any width; groups of 6 divide all inputs."""

RAGGED_GROUPS = EVEN | {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 6, "head_dim": 16}
"""The last group of 64 is half of one; compressed-tensors has no such groups."""


def grid() -> Iterator[tuple[str, Checkpoint]]:
    """Every format, width, kind of zero point and of scales."""
    even_groups = {"a scale an output": (EVEN, 0), "g32": (EVEN, 32), "g128": (EVEN, 128)}
    rows = even_groups | {"ragged words": (RAGGED_WORDS, 6)}
    for (scales, (shape, size)), symmetric in itertools.product(rows.items(), (True, False)):
        zeros = "symmetric" if symmetric else "zero points"
        for bits in range(2, 9):
            yield (
                f"pack-quantized, {bits} bits, {zeros}, {scales}",
                compressed(shape, scheme(integers(bits, symmetric, size))),
            )
        for form in ("int-quantized", "naive-quantized"):
            yield (
                f"{form}, {zeros}, {scales}",
                compressed(shape, scheme(integers(8, symmetric, size), format=form), format=form),
            )
    rows = even_groups | {"ragged groups": (RAGGED_GROUPS, 64)}
    for (scales, (shape, size)), symmetric in itertools.product(rows.items(), (True, False)):
        zeros = "symmetric" if symmetric else "zero points"
        yield f"AWQ, {zeros}, {scales}", awq(shape, size or -1, symmetric)
        for bits, version in itertools.product(range(2, 9), (1, 2)):
            yield (
                f"GPTQ {version}, {bits} bits, {zeros}, {scales}",
                gptq(shape, bits, size or -1, symmetric=symmetric, version=version),
            )
    for form in ("float-quantized", "naive-quantized"):
        for strategy in ("tensor", "channel"):
            yield f"{form} FP8, a scale a {strategy}", compressed(EVEN, scheme(fp8(strategy), format=form), format=form)
    for size in (32, 128):
        yield f"float-quantized FP8, g{size}", compressed(EVEN, scheme(fp8("group", group_size=size)))
    for name, shape in {"whole": EVEN, "ragged": RAGGED_GROUPS}.items():
        yield f"float-quantized FP8, {name} blocks", compressed(shape, scheme(fp8("block", block_structure=[64, 64])))
        yield f"fine-grained FP8, {name} blocks", fine_grained_fp8(shape, [64, 64])
    yield "fine-grained FP8, a scale a tensor", fine_grained_fp8(EVEN, None)


CHECKPOINTS = SEVERAL | dict(grid())
DEFAULT = (
    "q, k, v in different ways",
    "GPTQ with inputs grouped by activations, the same groups for q, k and v",
    "AWQ",
    "pack-quantized, 5 bits, zero points, ragged words",
    "GPTQ 2, 3 bits, symmetric, ragged groups",
    "fine-grained FP8, ragged blocks",
)


def save_checkpoint(name: str, folder: Path) -> Oracle:
    """The dequantised model with random adapters; its checkpoint is in the folder `checkpoint`."""
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**CHECKPOINTS[name].shape))
    CHECKPOINTS[name].save(model, folder / "checkpoint")
    oracle = Oracle(model, folder)
    add_random_adapters(oracle)
    return oracle


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.long(reason="one of 200 checkpoints"))
        for name in CHECKPOINTS
    ],
)
def test_tokens_are_those_of_peft_over_the_dequantised_weights(
    name: str, tmp_path: Path, default_model_dir: Path
) -> None:
    oracle = save_checkpoint(name, tmp_path)
    engine = build_engine(
        tmp_path / "checkpoint",
        oracle,
        default_model_dir,
        max_num_batched_tokens=40,
        max_num_seqs=NUM_PROMPTS,
        num_threads=1,
    )
    requests = requests_for(oracle, tiny_prompts(NUM_PROMPTS), max_tokens=16)
    answers = run_all(engine, requests)
    assert_greedy(oracle, requests, answers)
    base = [GenerationRequest(r.request_id, r.prompt_token_ids, r.sampling) for r in requests]
    assert_adapters_matter(requests, answers, run_all(engine, base))
    engine.close()


MIXTURE = TINY | {
    "hidden_size": 40,
    "head_dim": 8,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "num_experts_per_tok": 2,
}
"""Groups of 8, and words of AWQ, divide all sizes."""
EXPERTS = {"num_experts": 5, "moe_intermediate_size": 24}
MIXTURES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3 moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**MIXTURE, **EXPERTS, norm_topk_prob=True, mlp_only_layers=[1])
    ),
    "qwen2 moe": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**MIXTURE, **EXPERTS, shared_expert_intermediate_size=56, norm_topk_prob=True)
    ),
    "olmoe": lambda: OlmoeForCausalLM(
        OlmoeConfig(**MIXTURE | {"hidden_size": 48, "intermediate_size": 32}, num_experts=6)
    ),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**MIXTURE | {"intermediate_size": 56}, num_local_experts=4)),
}
ROUTERS = r"re:.*\.(gate|shared_expert_gate)$"
OF_MIXTURES: dict[str, tuple[str, Save]] = {
    "pack-quantized with zero points": (
        "qwen3 moe",
        compressed({}, scheme(integers(4, False, 8)), ignore=["lm_head", ROUTERS]).save,
    ),
    "int8 in channels": ("qwen2 moe", compressed({}, scheme(integers(8, True)), ignore=["lm_head", ROUTERS]).save),
    "FP8 in channels": ("mixtral", compressed({}, scheme(fp8("channel")), ignore=["lm_head", ROUTERS]).save),
    "FP8 a tensor": ("qwen3 moe", compressed({}, scheme(fp8("tensor")), ignore=["lm_head", ROUTERS]).save),
    "blocks of FP8": ("olmoe", fine_grained_fp8({}, [16, 8]).save),
    "GPTQ": ("qwen2 moe", gptq({}, 4, 8).save),
    "GPTQ 2, 8 bits, symmetric": ("mixtral", gptq({}, 8, 8, symmetric=True, version=2).save),
    "AWQ": ("mixtral", awq({}, 8, symmetric=False).save),
    "experts of one layer alone": (
        "qwen3 moe",
        compressed({}, scheme(integers(4, True, 8), r"re:.*layers\.2\.mlp\.experts.*")).save,
    ),
    "gate and up in another way than down": (
        "olmoe",
        compressed(
            {}, scheme(integers(4, True, 8), r"re:.*experts.*(gate|up)_proj"), scheme(fp8("channel"), "re:.*down_proj")
        ).save,
    ),
}
GPT_OSS = MIXTURE | {"hidden_size": 64, "intermediate_size": 96, "sliding_window": 24, "swiglu_limit": 2.0}


def save_gpt_oss(folder: Path) -> PreTrainedModel:
    """Experts in MXFP4, with biases. All floats are bfloat16's."""
    model = GptOssForCausalLM(GptOssConfig(**GPT_OSS, num_local_experts=5))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.normal_(0.5, 0.3)
            parameter.copy_(parameter.bfloat16())
    save_mxfp4(model, folder / "checkpoint")
    return model


def save_mixture(name: str, folder: Path) -> PreTrainedModel:
    """The dequantised model; its checkpoint is in the folder `checkpoint`."""
    torch.manual_seed(7)
    if name == "MXFP4":
        return save_gpt_oss(folder)
    family, save = OF_MIXTURES[name]
    model = MIXTURES[family]()
    with checkpoint_modules(model) as modules:
        save(modules, folder / "checkpoint")
    return model


@pytest.mark.parametrize(
    "name", ["AWQ", *(pytest.param(n, marks=pytest.mark.long(reason="2 s each")) for n in OF_MIXTURES if n != "AWQ")]
)
def test_transformers_modules_choose_the_same_tokens_over_the_same_codes(
    name: str, tmp_path: Path, default_model_dir: Path
) -> None:
    save_mixture(name, tmp_path)
    sampling = SamplingParams(max_tokens=16, end_id=-1)
    requests = [GenerationRequest(f"r{i}", prompt, sampling) for i, prompt in enumerate(tiny_prompts(7))]
    answers = []
    for implementation in ("native", "transformers"):
        config = EngineConfig(
            model_path=tmp_path / "checkpoint",
            tokenizer_path=default_model_dir,
            num_threads=1,
            kv_cache_memory_bytes=4 << 20,  # type: ignore[arg-type]
            model_implementation=implementation,  # type: ignore[arg-type]
        )
        engine = Engine(config)
        assert any("groups" in kind for kind in engine._runner._model.weight_bytes)
        answers.append([answer.token_ids for answer in run_all(engine, requests).values()])
    assert answers[0] == answers[1]


DEFAULT_MIXTURES = ("AWQ", "blocks of FP8", "MXFP4")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in DEFAULT_MIXTURES else pytest.mark.long(reason="3 s each"))
        for name in (*OF_MIXTURES, "MXFP4")
    ],
)
def test_tokens_of_mixtures_are_those_of_merged_adapters_over_the_dequantised_weights(
    name: str, tmp_path: Path, default_model_dir: Path
) -> None:
    oracle = MixtureOracle(save_mixture(name, tmp_path), tmp_path)
    oracle.add_random("attention", 3, ATTENTION, seed=1)
    oracle.add_random("DoRA", 2, ["k_proj", "o_proj"], seed=2, use_dora=True)
    add_expert_adapters(oracle)
    options = {"max_num_batched_tokens": 40, "max_num_seqs": NUM_PROMPTS, "num_threads": 1}
    engine = make_engine(oracle, tmp_path / "checkpoint", default_model_dir, **options)
    requests = requests_for(oracle, tiny_prompts(18), max_tokens=20)
    answers = run_all(engine, requests)
    assert_greedy(oracle, requests, answers)
    base = [GenerationRequest(r.request_id, r.prompt_token_ids, r.sampling) for r in requests]
    assert_adapters_matter(requests, answers, run_all(engine, base))
    engine.close()


@pytest.mark.parametrize("name", ["MXFP4", pytest.param("AWQ", marks=pytest.mark.long(reason="2 s"))])
def test_a_quantised_mixture_in_bfloat16_has_the_same_tokens_alone_as_in_a_batch(
    name: str, tmp_path: Path, default_model_dir: Path
) -> None:
    oracle = MixtureOracle(save_mixture(name, tmp_path), tmp_path)
    oracle.add_random("attention", 3, ATTENTION, seed=1)
    add_expert_adapters(oracle)
    engine = make_engine(oracle, tmp_path / "checkpoint", default_model_dir, dtype="bfloat16", num_threads=1)
    requests = requests_for(oracle, tiny_prompts(12), max_tokens=12)
    answers = run_all(engine, requests)
    if (
        name != "MXFP4"
    ):  # A rounded activation may choose another expert, which changes all of that small model's logits.
        assert_nearly_greedy_in_bfloat16(oracle, requests, answers)
    assert_same_alone(engine, requests[::5], answers)
    engine.close()


BFLOAT16 = (
    "w4a16 in groups",
    *(
        pytest.param(name, marks=pytest.mark.long(reason="the kernels' tests have all kinds of codes"))
        for name in ("w3a16 with zero points", "head and embeddings too", "blocks of FP8", "AWQ")
    ),
)


@pytest.mark.parametrize("name", BFLOAT16)
def test_bfloat16_chooses_what_is_nearly_the_best_token_and_the_same_alone_as_in_a_batch(
    name: str, tmp_path: Path, default_model_dir: Path
) -> None:
    oracle = save_checkpoint(name, tmp_path)
    engine = build_engine(tmp_path / "checkpoint", oracle, default_model_dir, dtype="bfloat16", num_threads=1)
    requests = requests_for(oracle, tiny_prompts(14), max_tokens=16)
    answers = run_all(engine, requests)
    assert_nearly_greedy_in_bfloat16(oracle, requests, answers)
    assert_same_alone(engine, requests[:: len(oracle.adapters) - 1], answers)
    engine.close()
