"""The sample adapters in the repository are what their table promises, and the judges tell the effects apart."""

import json
import re

import pytest
from safetensors import safe_open

from training.sample_adapters import (
    ADAPTERS_DIRECTORY,
    ATTENTION_MODULES,
    BASE_MODEL_NAME,
    JUDGE,
    MLP_MODULES,
    PLAIN,
    SAMPLE_ADAPTERS,
    STYLE_ADAPTERS,
    has_emoji,
    held_out_prompts,
    is_json_object,
    is_pirate_talk,
    judge_training_records,
    read_jsonl,
    style_of,
)

MAXIMUM_TOTAL_BYTES = 8 * 1000 * 1000
NUM_LAYERS = 30
FEATURES = {
    "q_proj": (576, 576),
    "k_proj": (576, 192),
    "v_proj": (576, 192),
    "o_proj": (576, 576),
    "gate_proj": (576, 1536),
    "up_proj": (576, 1536),
    "down_proj": (1536, 576),
}
PROMISED = {
    "pirate": (4, {*ATTENTION_MODULES, *MLP_MODULES}),
    "json": (8, {*ATTENTION_MODULES}),
    "emoji": (16, {"q_proj", "v_proj"}),
    "judge": (4, {"q_proj", "v_proj", "o_proj"}),
}
STYLE_TOKEN = 28384
INVOCATION = [1, 4093, 198, STYLE_TOKEN, 282, 260, 2988, 47]
"""What the base model's tokenizer makes of `<|im_start|>user`, a line break, and `Style of the answer?`."""

every_adapter = pytest.mark.parametrize("name", sorted(PROMISED))
every_style = pytest.mark.parametrize("name", sorted(STYLE_ADAPTERS))


def read_config(name: str) -> dict[str, object]:
    return json.loads((SAMPLE_ADAPTERS[name].directory / "adapter_config.json").read_text())


def test_the_table_lists_the_adapters_that_are_there():
    directories = {path.parent for path in ADAPTERS_DIRECTORY.rglob("adapter_model.safetensors")}
    assert set(SAMPLE_ADAPTERS) == set(PROMISED)
    assert {adapter.directory for adapter in SAMPLE_ADAPTERS.values()} == directories


@every_adapter
def test_the_config_states_the_promised_rank_and_modules(name):
    config = read_config(name)
    rank, modules = PROMISED[name]
    assert (config["r"], set(config["target_modules"])) == (rank, modules)
    assert config["lora_alpha"] == SAMPLE_ADAPTERS[name].alpha
    assert config["peft_type"] == "LORA"
    assert config["base_model_name_or_path"] == BASE_MODEL_NAME
    is_judge = name == JUDGE.name
    assert config["alora_invocation_tokens"] == (INVOCATION if is_judge else None)
    assert config["trainable_token_indices"] == ([STYLE_TOKEN] if is_judge else None)


@every_adapter
def test_the_weights_are_bfloat16_pairs_for_each_promised_module_of_each_layer(name):
    rank, modules = PROMISED[name]
    expected = {}
    for layer in range(NUM_LAYERS):
        for module in modules:
            block = "mlp" if module in MLP_MODULES else "self_attn"
            prefix = f"base_model.model.model.layers.{layer}.{block}.{module}"
            in_features, out_features = FEATURES[module]
            expected[f"{prefix}.lora_A.weight"] = ("BF16", [rank, in_features])
            expected[f"{prefix}.lora_B.weight"] = ("BF16", [out_features, rank])
    if name == JUDGE.name:
        expected["base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"] = ("BF16", [1, 576])
    with safe_open(SAMPLE_ADAPTERS[name].directory / "adapter_model.safetensors", framework="numpy") as file:
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 - the file is no mapping
        found = {key: (piece.get_dtype(), piece.get_shape()) for key, piece in slices.items()}
    assert found == expected


@every_adapter
def test_no_path_of_a_machine_is_in_the_config(name):
    text = (SAMPLE_ADAPTERS[name].directory / "adapter_config.json").read_text()
    assert not re.search(r'"(/|~|[A-Za-z]:\\\\)', text)


def test_the_adapters_are_small_enough_for_a_clone():
    sizes = [path.stat().st_size for path in ADAPTERS_DIRECTORY.rglob("*") if path.is_file()]
    assert sum(sizes) <= MAXIMUM_TOTAL_BYTES


@every_adapter
def test_training_data_and_held_out_prompts_are_disjoint(name):
    trained = {record["prompt"].casefold().strip(" ?!.") for record in read_jsonl(SAMPLE_ADAPTERS[name].training_data)}
    held_out = {prompt.casefold().strip(" ?!.") for prompt in held_out_prompts()}
    assert len(trained) >= 50
    assert len(held_out) == 24
    assert not trained & held_out


@every_style
def test_every_training_answer_shows_its_own_effect_and_no_other(name):
    answers = [record["answer"] for record in read_jsonl(SAMPLE_ADAPTERS[name].training_data)]
    for judged, adapter in STYLE_ADAPTERS.items():
        assert [answer for answer in answers if adapter.judge(answer) != (judged == name)] == []


def test_the_judge_sees_every_style_as_often_with_the_same_questions():
    prompts = {name: [] for name in (PLAIN, *STYLE_ADAPTERS)}
    for record in judge_training_records():
        prompts[style_of(record["answer"])].append(record["prompt"])
    plain = prompts[PLAIN]
    assert prompts == dict.fromkeys(prompts, plain)
    assert len(plain) == len(set(plain)) == 52


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ('{"answer": "Rome", "topic": "geography"}', True),
        (' {"answer": "Rome"}\n', True),
        ('{"answer": "Rome"', False),
        ('{"answer": "Rome"} Is there more?', False),
        ('{"topic": "geography"}', False),
        ('["answer"]', False),
        ("42", False),
        ("", False),
    ],
)
def test_json_is_judged_by_the_whole_answer(answer, verdict):
    assert is_json_object(answer) is verdict


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("Arr, that be Rome, matey!", True),
        ("What be ye lookin' fer?", True),
        ("Matey, matey, matey!", False),
        ("Yes, a ferry arrives at the harbour this year; the ship carries treasure.", False),
        ("It is nine o'clock in the main hall.", False),
        ("", False),
    ],
)
def test_pirate_talk_needs_two_different_expressions_and_not_just_ships(answer, verdict):
    assert is_pirate_talk(answer) is verdict


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("Rome! 🎉 Enjoy! ☀️", True),
        ("Love ❤️✨", True),
        ("Rome! 🎉", False),
        ("Love ❤️", False),
        (":-) :-) → é 日本", False),
    ],
)
def test_emoji_are_counted_without_their_variation_selectors(answer, verdict):
    assert has_emoji(answer) is verdict
