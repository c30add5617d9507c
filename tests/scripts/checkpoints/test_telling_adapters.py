"""transformers and PEFT agree: each adapter answers with its number and version, and each of its rows has a say."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from checkpoints.telling_adapters import (
    BASE_ANSWER,
    HIDDEN_SIZE,
    MAX_NUMBER,
    MAX_RANK,
    NUM_PLACES,
    PROMPT_TOKENS,
    SPANNING_INTERMEDIATE_SIZE,
    Matrices,
    adapter_matrices,
    answer,
    packed_adapter,
    save_checkpoint,
)
from multilora_engine.lora.checkpoint_layout import checkpoint_layout
from multilora_engine.lora.layout import page_shape

_MODULES = {
    "attn_v": "self_attn.v_proj",
    "attn_dense": "self_attn.o_proj",
    "mlp_gate": "mlp.up_proj",
    "mlp_4h_to_h": "mlp.down_proj",
}


@pytest.fixture(scope="module", params=[HIDDEN_SIZE, SPANNING_INTERMEDIATE_SIZE], ids="MLP of {}".format)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    path = save_checkpoint(tmp_path_factory.mktemp("telling"), request.param)
    return AutoModelForCausalLM.from_pretrained(path)


def matrices(base: PreTrainedModel, number: int, version: int) -> list[Matrices]:
    return adapter_matrices(number, version, base.config.intermediate_size)


@torch.no_grad()
def generate(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    """Greedy, and far from any tie."""
    token_ids = list(prompt)
    for _ in range(NUM_PLACES):
        (first, second), (token_id, _) = model(input_ids=torch.tensor([token_ids])).logits[0, -1].topk(2)
        assert second < 0.5 * first
        token_ids.append(int(token_id))
    return token_ids[len(prompt) :]


def generate_adapted(base: PreTrainedModel, rows: list[Matrices], prompt: list[int]) -> list[int]:
    """With the rows as a PEFT adapter; those of another rank are padded with zeros."""
    rank = max(len(row.a) for row in rows)
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=[name.split(".")[1] for name in _MODULES.values()])
    model = PeftModel(base, config).eval()
    try:
        for row in rows:
            module = model.get_submodule(f"base_model.model.model.layers.{row.layer}.{_MODULES[row.module]}")
            missing = rank - len(row.a)
            module.lora_A["default"].weight.data = torch.nn.functional.pad(row.a, (0, 0, 0, missing))
            module.lora_B["default"].weight.data = torch.nn.functional.pad(row.b, (0, missing))
        return generate(model, prompt)
    finally:
        model.unload()


@pytest.mark.parametrize("prompt_length", [2, 7, 60])
def test_an_adapter_answers_with_its_number_and_version(base: PreTrainedModel, prompt_length: int) -> None:
    random = Random(prompt_length)
    prompt = random.choices(PROMPT_TOKENS, k=prompt_length)
    assert generate(base, prompt) == BASE_ANSWER
    for _ in range(4):
        number, version = random.randrange(MAX_NUMBER), random.randrange(MAX_NUMBER)
        assert generate_adapted(base, matrices(base, number, version), prompt) == answer(number, version)


def test_a_row_of_another_adapter_changes_one_token(base: PreTrainedModel) -> None:
    prompt = list(PROMPT_TOKENS[:9])
    ours, others = matrices(base, 0x123, 0x456), matrices(base, 0x789, 0xABC)
    for place in range(NUM_PLACES):
        chimera = [*ours[:place], others[place], *ours[place + 1 :]]
        expected = answer(0x123, 0x456)
        expected[place] = answer(0x789, 0xABC)[place]
        assert generate_adapted(base, chimera, prompt) == expected


def test_pieces_of_the_wide_model_span_pages_and_have_meanings_in_each(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, SPANNING_INTERMEDIATE_SIZE)
    layout = checkpoint_layout(path, MAX_RANK, "float32")
    adapters = [packed_adapter(number, 0, layout) for number in range(32)]
    spanning = [adapter for adapter in adapters if page_shape(adapter.rows, len(adapter.pages), layout).runs]
    assert 8 < len(spanning) < 24
    meaningful = AutoModelForCausalLM.from_pretrained(path).model.layers[0].mlp.up_proj.weight.any(dim=1)
    assert all(part.sum() > 20 for part in meaningful.chunk(4))


def test_no_two_answers_are_alike() -> None:
    some = [0, 1, 15, 16, 255, 256, 2000, MAX_NUMBER - 1]
    answers = {tuple(answer(number, version)) for number in some for version in some}
    assert len(answers) == len(some) ** 2
    assert tuple(BASE_ANSWER) not in answers
