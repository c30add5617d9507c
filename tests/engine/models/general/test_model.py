"""Checkpoints of transformers' decoders: all of their tensors, in each way of storing them, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines import run_all
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, PreTrainedModel

from checkpoints.tiny_decoders import tiny_decoder
from multilora_engine.config import EngineConfig
from multilora_engine.engine.engine import Engine
from multilora_engine.errors import ConfigError
from multilora_engine.models.general import modules, probe, trace
from multilora_engine.models.general.model import GeneralModel
from multilora_engine.models.general.tree import PAGED, build_tree, read_hf_config
from multilora_engine.models.loader import load_model
from multilora_engine.models.registry import read_model_config
from multilora_engine.models.weights import Placement
from multilora_engine.request import GenerationRequest, SamplingParams
from multilora_engine.sequences.prompt_log_probs import row_type

FLOAT32 = Placement(torch.float32, torch.float32, torch.device("cpu"))
Tensors = dict[str, torch.Tensor]


def saved(model_type: str, directory: Path, **changes: object) -> tuple[PreTrainedModel, Path]:
    model = tiny_decoder(model_type, **changes)
    model.save_pretrained(directory)
    return model, directory


def loaded(path: Path, placement: Placement = FLOAT32) -> GeneralModel:
    model = load_model(path, placement, config=read_model_config(path, "transformers"))
    assert isinstance(model, GeneralModel)
    return model


def rewrite(path: Path, change: Callable[[Tensors], Tensors]) -> None:
    save_file(change(load_file(path / "model.safetensors")), path / "model.safetensors")


@torch.inference_mode()
def assert_same_rows(model: GeneralModel, expected: PreTrainedModel) -> None:
    """The rows before the head, by transformers' own attention."""
    tokens = torch.arange(20) * 13 % 311
    model.tree.config._attn_implementation = "eager"
    rows = model.run_body(tokens)
    model.tree.config._attn_implementation = "multilora"
    logits = model.logits((rows, rows), torch.arange(20), None)
    torch.testing.assert_close(logits, expected(tokens[None]).logits[0], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_checkpoint_of_the_body_alone_with_old_buffers_is_the_same_model(is_tied: bool, tmp_path: Path) -> None:
    model, path = saved("gpt2", tmp_path, tie_word_embeddings=True)
    assert isinstance(model, GPT2LMHeadModel)

    def as_first_published(tensors: Tensors) -> Tensors:
        renamed = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        more = {f"h.{layer}.attn.bias": torch.ones(1, 1, 8, 8) for layer in range(3)}
        return renamed | more | ({"lm_head.weight": renamed["wte.weight"].clone()} if is_tied else {})

    rewrite(path, as_first_published)
    assert_same_rows(loaded(path), model)


def test_a_head_that_differs_from_the_embeddings_it_is_tied_to_is_refused(tmp_path: Path) -> None:
    _, path = saved("gpt2", tmp_path, tie_word_embeddings=True)
    rewrite(path, lambda tensors: tensors | {"lm_head.weight": tensors["transformer.wte.weight"] + 1})
    with pytest.raises(ConfigError, match=r"lm_head.weight differs from transformer.wte.weight"):
        loaded(path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda tensors: {k: v for k, v in tensors.items() if "h.1.ln_2.bias" not in k},
            r"1 tensors are missing.*h.1.ln_2",
        ),
        (lambda tensors: tensors | {"transformer.h.0.mlp.c_up.weight": torch.ones(3)}, "unexpected tensor.*c_up"),
        (lambda tensors: tensors | {"h.0.ln_1.bias": torch.ones(48)}, "h.0.ln_1.bias"),
        (lambda tensors: tensors | {"transformer.wpe.weight": torch.ones(9, 48)}, r"has shape \[9, 48\].*\[512, 48\]"),
        (
            lambda tensors: tensors | {"transformer.h.0.mlp.c_fc.weight": torch.ones(192, 48)},
            r"c_fc.weight has shape \[192, 48\], config.json asks for \[48, 192\]",
        ),
        (lambda tensors: tensors | {"transformer.ln_f.bias": torch.ones(48, dtype=torch.int8)}, "is stored as int8"),
    ],
    ids=["missing", "unexpected", "twice", "other positions", "not transposed", "codes"],
)
def test_every_tensor_has_its_place_or_is_an_error(
    change: Callable[[Tensors], Tensors], reason: str, tmp_path: Path
) -> None:
    _, path = saved("gpt2", tmp_path)
    rewrite(path, change)
    with pytest.raises(ConfigError, match=reason):
        loaded(path)


@pytest.mark.parametrize("is_stacked", [False, True])
def test_experts_are_read_one_by_one_and_stacked(is_stacked: bool, tmp_path: Path) -> None:
    model, path = saved("ernie4_5_moe", tmp_path)
    if is_stacked:
        rewrite(path, lambda _: {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()})
    assert any(".experts.3.up_proj." in name for name in load_file(path / "model.safetensors")) != is_stacked
    assert_same_rows(loaded(path), model)


def test_an_expert_that_is_missing_is_an_error(tmp_path: Path) -> None:
    _, path = saved("ernie4_5_moe", tmp_path)
    gone = "model.layers.1.mlp.experts.3.up_proj.weight"
    rewrite(path, lambda tensors: {name: tensor for name, tensor in tensors.items() if name != gone})
    with pytest.raises(ConfigError, match=r"1 tensors are missing from the checkpoint: model.layers.1.mlp.experts"):
        loaded(path)


def test_tensors_that_transformers_would_convert_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.core_model_loading import Transpose, WeightConverter

    from multilora_engine.models.general import tensor_names

    _, path = saved("gpt_neox", tmp_path)
    converter = WeightConverter("attention.dense.weight", "attention.dense.weight", [Transpose(0, 1)])
    monkeypatch.setattr(tensor_names, "get_model_conversion_mapping", lambda tree: [converter])
    with pytest.raises(ConfigError, match=r"attention.dense: transformers makes others of them"):
        loaded(path)


def test_attention_that_differs_stops_the_load_with_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, path = saved("gpt_neox", tmp_path)
    monkeypatch.setattr(trace, "window_of", lambda pattern, max_length: 7)
    with pytest.raises(ConfigError, match=r"other logits than transformers' own: the largest difference is 0\.\d+ of"):
        loaded(path)


def test_work_between_tokens_beside_attention_stops_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, path = saved("gpt_neox", tmp_path)
    output = modules.LinearGroup.output

    def shifted(group: modules.LinearGroup, index: int, x: torch.Tensor) -> torch.Tensor:
        """As a convolution over tokens: each row gets something of the row before."""
        y = output(group, index, x)
        return y + torch.nn.functional.pad(y[:, :-1], (0, 0, 1, 0))

    monkeypatch.setattr(modules.LinearGroup, "output", shifted)
    with pytest.raises(ConfigError, match="the largest difference is"):
        loaded(path)


@pytest.mark.parametrize("model_type", ["gpt2", "stablelm"])
def test_weights_and_arithmetic_of_bfloat16_pass_the_probe(model_type: str, tmp_path: Path) -> None:
    model = tiny_decoder(model_type, initializer_range=0.05).bfloat16()
    model.save_pretrained(tmp_path)
    model = loaded(tmp_path, Placement(torch.bfloat16, torch.bfloat16, torch.device("cpu")))
    assert model.weight_bytes["bfloat16"] > model.weight_bytes.get("float32", 0)


@pytest.mark.parametrize(
    ("model_type", "dtype"), [("dots1", torch.bfloat16), ("flint", torch.bfloat16), ("afmoe", torch.float16)]
)
def test_biases_of_routers_and_their_like_stay_float32_as_in_transformers(
    model_type: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    _, path = saved(model_type, tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    tree = build_tree(read_hf_config(path), dtype, PAGED)
    types = [{name: x.dtype for name, x in model.state_dict().items()} for model in (tree, expected)]
    assert types[0] == types[1]
    assert torch.float32 in types[0].values()


def test_tokens_and_log_probs_of_prompts_are_those_of_transformers(tmp_path: Path, default_model_dir: Path) -> None:
    reference, path = saved("stablelm", tmp_path)
    config = EngineConfig(
        model_path=path,
        tokenizer_path=default_model_dir,
        num_threads=1,
        kv_cache_memory_bytes=4 << 20,  # type: ignore[arg-type]
        model_implementation="transformers",
    )
    engine = Engine(config)
    prompts = [[(7 * i + n) % 311 for i in range(9 + n)] for n in range(4)]
    sampling = SamplingParams(max_tokens=5, end_id=-1, return_prompt_log_probs=True)
    requests = [GenerationRequest(f"r{n}", prompt, sampling) for n, prompt in enumerate(prompts)]
    answers = run_all(engine, requests)
    for n, prompt in enumerate(prompts):
        answer = answers[f"r{n}"]
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + answer.token_ids[:-1]])).logits[0]
        assert answer.token_ids == logits[len(prompt) - 1 :].argmax(-1).tolist()
        expected = logits[: len(prompt) - 1].log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        told = np.frombuffer(answer.prompt_log_probs, row_type(0))["log_prob"][1:]
        np.testing.assert_allclose(told, expected, atol=1e-3)
    engine.close()


def test_config_and_weights_are_read_without_a_change_of_either(tmp_path: Path) -> None:
    model, path = saved("opt", tmp_path)
    before = json.loads((path / "config.json").read_text())
    assert_same_rows(loaded(path), AutoModelForCausalLM.from_pretrained(path))
    assert json.loads((path / "config.json").read_text()) == before
    assert model.training is False


@pytest.mark.parametrize(
    ("error", "is_told_as_it_is"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
            True,
        ),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_memory_that_runs_out_is_no_fault_of_a_model_s_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, is_told_as_it_is: bool
) -> None:
    _, path = saved("gpt2", tmp_path)
    model = loaded(path)

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(model, "run_body", fail)
    with pytest.raises(type(error) if is_told_as_it_is else ConfigError) as caught:
        probe.check_attention(model)
    assert (caught.value is error) == is_told_as_it_is
    monkeypatch.setattr(trace._Recorder, "run", fail)
    with pytest.raises(type(error) if is_told_as_it_is else trace.Unserved) as caught:
        trace.trace(model.tree, lambda module: False, 9)
    assert (caught.value is error) == is_told_as_it_is
