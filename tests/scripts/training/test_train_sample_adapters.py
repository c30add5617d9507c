"""What the sample adapters learn from: answers in the chat template, with no loss on the prompt."""

from itertools import chain

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from training.train_sample_adapters import answer_loss, collate, shuffled_batches, warmup_cosine


def test_only_the_answer_of_each_example_carries_loss():
    batch = collate([([5, 6, 7], [8, 2]), ([5], [9, 10, 2])])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 2], [5, 9, 10, 2, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]
    assert batch["labels"].tolist() == [[-100, -100, -100, 8, 2], [-100, 9, 10, 2, -100]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def tiny_model(invocation_tokens: list[int] | None) -> PeftModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=17,
        hidden_size=12,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        initializer_range=0.5,
    )
    lora = LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, alora_invocation_tokens=invocation_tokens)
    return get_peft_model(LlamaForCausalLM(config), lora)


def test_the_loss_is_that_of_transformers_though_prompts_get_no_logits():
    model = tiny_model(None)
    batch = collate([([5, 6, 7], [8, 2]), ([5], [9, 10, 2]), ([1, 3, 4, 5], [11, 2])])
    torch.testing.assert_close(answer_loss(model, **batch), model(**batch).loss)


def test_an_activated_adapters_loss_has_its_position():
    model = tiny_model([3, 4])
    without, invoked = collate([([5, 6, 7], [8, 2])]), collate([([5, 3, 4, 7], [8, 2])])
    losses = [(answer_loss(model, **batch), model(**batch).loss) for batch in (without, invoked)]
    for actual, expected in losses:
        torch.testing.assert_close(actual, expected)
    with model.disable_adapter():
        plain = [answer_loss(model, **batch) for batch in (without, invoked)]
    torch.testing.assert_close(losses[0][0], plain[0])
    assert abs(losses[1][0] - plain[1]) > 1e-3


def test_every_epoch_sees_every_example_once_in_another_order():
    examples = [([number], [2]) for number in range(11)]
    batches = list(shuffled_batches(examples, epochs=2, batch_size=4))
    assert [len(batch) for batch in batches] == [4, 4, 3, 4, 4, 3]
    first, second = list(chain(*batches[:3])), list(chain(*batches[3:]))
    assert sorted(first) == sorted(second) == examples
    assert first != second


def test_the_learning_rate_rises_to_its_peak_and_falls_to_zero():
    factors = [warmup_cosine(step, num_steps=50, num_warmup_steps=10) for step in range(51)]
    assert factors[9] == factors[10] == 1.0
    assert factors[:10] == sorted(factors[:10])
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[30] == pytest.approx(0.5)
    assert factors[50] == pytest.approx(0.0)
