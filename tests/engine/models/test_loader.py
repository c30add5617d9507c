"""Loading checkpoints: every tensor of the file arrives, and every mistake in it is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from multilora_engine.errors import ConfigError
from multilora_engine.models.checkpoint import weights_fingerprint
from multilora_engine.models.loader import load_model, stored_dtype
from multilora_engine.models.model import Model
from multilora_engine.models.weights import Placement

CPU = torch.device("cpu")
FLOAT32 = Placement(torch.float32, torch.float32, CPU)
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path, is_tied=False)


def save_checkpoint(path: Path, is_tied: bool, max_shard_size: str = "1GB") -> Path:
    config = LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=is_tied,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(path, max_shard_size=max_shard_size)
    return path


def change_weights(path: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of the single weights file."""
    tensors = {name: t for name, t in (load_file(path / WEIGHTS) | change).items() if t is not None}
    save_file(tensors, path / WEIGHTS)


def load(path: Path, dtype: torch.dtype = torch.float32) -> Model:
    return load_model(path, Placement(dtype, dtype, CPU))


def contents(model: Model) -> dict[str, torch.Tensor]:
    """What arrived, by the checkpoint's names."""
    places = model.checkpoint_tensors()
    return {name: place.tensor() for name, place in places.items()}


def test_a_sharded_checkpoint_loads_the_same_as_a_single_file(tmp_path: Path) -> None:
    single = contents(load(save_checkpoint(tmp_path / "single", is_tied=False)))
    sharded = contents(load(save_checkpoint(tmp_path / "sharded", is_tied=False, max_shard_size="4kB")))
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert single.keys() == sharded.keys()
    assert all(single[name].equal(sharded[name]) for name in single)


def test_every_tensor_of_the_file_is_in_the_model(checkpoint: Path) -> None:
    loaded = contents(load(checkpoint))
    stored = load_file(checkpoint / WEIGHTS)
    assert loaded.keys() == stored.keys()
    assert all(loaded[name].equal(stored[name]) for name in stored)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
def test_tensors_are_converted_to_the_wanted_type(checkpoint: Path, stored: torch.dtype) -> None:
    weights = {name: t.to(stored) for name, t in load_file(checkpoint / WEIGHTS).items()}
    change_weights(checkpoint, dict(weights))
    loaded = contents(load(checkpoint, torch.bfloat16))
    assert all(loaded[name].equal(weights[name].to(torch.bfloat16)) for name in weights)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_weights_stay_in_their_type_while_norms_are_computed_with(checkpoint: Path, stored: torch.dtype) -> None:
    change_weights(checkpoint, {name: t.to(stored) for name, t in load_file(checkpoint / WEIGHTS).items()})
    assert stored_dtype(checkpoint) == stored
    model = load_model(checkpoint, Placement(torch.float32, stored, CPU))
    dtypes = {name: tensor.dtype for name, tensor in contents(model).items()}
    assert dtypes == {name: torch.float32 if "norm" in name else stored for name in dtypes}
    elements = sum(math.prod(tensor.shape) for tensor in contents(model).values() if tensor.dim() == 2)
    assert 2 * elements <= sum(model.weight_bytes.values()) < 8 * elements


@pytest.mark.parametrize(
    ("change", "widest"),
    [
        ({K_PROJ: torch.zeros(8, 16, dtype=torch.bfloat16)}, torch.float32),
        ({K_PROJ: torch.zeros(8, 16, dtype=torch.float64)}, torch.float32),
        ({K_PROJ: torch.zeros(8, 16, dtype=torch.int8)}, torch.float32),
    ],
)
def test_the_type_of_a_checkpoint_holds_all_of_its_weights(
    checkpoint: Path, change: dict[str, torch.Tensor | None], widest: torch.dtype
) -> None:
    change_weights(checkpoint, change)
    assert stored_dtype(checkpoint) == widest


def test_bfloat16_and_float16_in_one_checkpoint_need_float32(checkpoint: Path) -> None:
    weights = {name: t.to(torch.bfloat16) for name, t in load_file(checkpoint / WEIGHTS).items()}
    change_weights(checkpoint, {**weights, K_PROJ: weights[K_PROJ].to(torch.float16)})
    assert stored_dtype(checkpoint) == torch.float32


def test_tied_embeddings_share_their_memory(tmp_path: Path) -> None:
    model = load(save_checkpoint(tmp_path, is_tied=True))
    assert "lm_head.weight" not in model.checkpoint_tensors()


def test_a_head_that_is_stored_although_tied_is_accepted_when_equal(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, is_tied=True)
    embeddings = load_file(tmp_path / WEIGHTS)["model.embed_tokens.weight"]
    change_weights(tmp_path, {"lm_head.weight": embeddings.clone()})
    assert contents(load(tmp_path))["model.embed_tokens.weight"].equal(embeddings)


def test_a_head_that_is_stored_although_tied_is_refused_when_different(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, is_tied=True)
    change_weights(tmp_path, {"lm_head.weight": torch.zeros(31, 16)})
    with pytest.raises(ConfigError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        load(tmp_path)


def test_rotary_buffers_of_old_checkpoints_are_ignored(checkpoint: Path) -> None:
    change_weights(checkpoint, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})
    load(checkpoint)


def test_progress_counts_every_tensor_once(checkpoint: Path) -> None:
    seen: list[tuple[int, int]] = []
    model = load_model(checkpoint, FLOAT32, on_progress=lambda done, total: seen.append((done, total)))
    total = len(model.checkpoint_tensors())
    assert seen == [(i + 1, total) for i in range(total)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({K_PROJ: None}, f"1 tensors are missing from the checkpoint: {K_PROJ}"),
        ({"lm_head.weight": None}, "missing from the checkpoint: lm_head.weight"),
        ({K_PROJ: torch.zeros(16, 8)}, f"tensor {K_PROJ} has shape [16, 8], config.json asks for [8, 16]"),
        ({K_PROJ: torch.zeros(8, 16, dtype=torch.int8)}, f"tensor {K_PROJ} is stored as int8"),
        ({"model.layers.1.self_attn.k_proj.bias": torch.zeros(8)}, "unexpected tensor model.layers.1.self_attn.k_proj"),
        ({"model.layers.2.input_layernorm.weight": torch.zeros(16)}, "unexpected tensor model.layers.2"),
    ],
)
def test_a_tensor_that_does_not_fit_config_json_is_refused_by_name(
    checkpoint: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    change_weights(checkpoint, change)
    with pytest.raises(ConfigError) as caught:
        load(checkpoint)
    assert message in str(caught.value)


MIXTURE = "model.layers.0.block_sparse_moe."
W1 = f"{MIXTURE}experts.2.w1.weight"
STACKED = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    shape = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1}
    config = MixtralConfig(**shape, num_attention_heads=4, num_key_value_heads=2, num_local_experts=3)
    torch.manual_seed(0)
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_every_tensor_of_a_mixture_is_in_the_model_and_the_router_in_float32(
    mixture: Path, stored: torch.dtype
) -> None:
    weights = {name: t.to(stored) for name, t in load_file(mixture / WEIGHTS).items()}
    change_weights(mixture, dict(weights))
    model = load(mixture, stored)
    loaded = contents(model)
    assert loaded.keys() == weights.keys()
    assert all(loaded[name].equal(weights[name].to(loaded[name].dtype)) for name in weights)
    assert loaded[f"{MIXTURE}gate.weight"].dtype == torch.float32
    assert loaded[W1].dtype == stored
    experts = sum(t.nbytes for name, t in weights.items() if ".experts." in name)
    assert sum(model.weight_bytes.values()) > experts


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({W1: None}, f"1 tensors are missing from the checkpoint: {W1}"),
        ({W1: torch.zeros(16, 20)}, f"tensor {W1} has shape [16, 20], config.json asks for [20, 16]"),
        ({W1: torch.zeros(20, 16, dtype=torch.int8)}, f"tensor {W1} is stored as int8"),
        ({W1.replace(".2.", ".3."): torch.zeros(20, 16)}, "unexpected tensor " + W1.replace(".2.", ".3.")),
        ({f"{MIXTURE}gate.weight": torch.zeros(4, 16)}, "has shape [4, 16], config.json asks for [3, 16]"),
        ({f"{MIXTURE}gate.bias": torch.zeros(3)}, f"unexpected tensor {MIXTURE}gate.bias"),
        ({STACKED: torch.zeros(3, 40, 16)}, f"unexpected tensor {MIXTURE}"),
    ],
)
def test_an_expert_that_does_not_fit_config_json_is_refused_by_name(
    mixture: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    change_weights(mixture, change)
    with pytest.raises(ConfigError) as caught:
        load(mixture)
    assert message in str(caught.value)


def test_a_tensor_in_two_shards_is_refused(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / WEIGHTS)
    save_file(tensors, checkpoint / "a.safetensors")
    save_file({K_PROJ: tensors[K_PROJ]}, checkpoint / "b.safetensors")
    write_index(checkpoint, {"x": "a.safetensors", "y": "b.safetensors"})
    with pytest.raises(ConfigError, match=f"{K_PROJ} is stored twice"):
        load(checkpoint)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/model.safetensors", "sub/x.safetensors", "x.bin", "", 7]
)
def test_an_index_that_leaves_the_directory_is_refused(checkpoint: Path, name: object) -> None:
    write_index(checkpoint, {K_PROJ: name})
    with pytest.raises(ConfigError, match=r"must be the name of a \.safetensors file in the same directory"):
        load(checkpoint)


@pytest.mark.parametrize("content", ["", "{}", '{"weight_map": 3}', "[]", '{"weight_map": {}}'])
def test_an_index_without_a_weight_map_is_refused(checkpoint: Path, content: str) -> None:
    (checkpoint / WEIGHTS).unlink()
    (checkpoint / INDEX).write_text(content)
    with pytest.raises(ConfigError, match="weight_map"):
        load(checkpoint)


def test_a_fingerprint_is_of_the_weights(checkpoint: Path) -> None:
    before = weights_fingerprint(checkpoint)
    (checkpoint / "config.json").write_text((checkpoint / "config.json").read_text() + " ")
    assert weights_fingerprint(checkpoint) == before
    tensors = load_file(checkpoint / WEIGHTS)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, checkpoint / WEIGHTS)
    assert weights_fingerprint(checkpoint) != before


def test_an_index_that_an_earlier_save_left_is_not_read(checkpoint: Path) -> None:
    (checkpoint / INDEX).write_text(json.dumps({"weight_map": {K_PROJ: "gone.safetensors"}}))
    load(checkpoint)


def test_a_shard_that_is_missing_is_refused_by_name(checkpoint: Path) -> None:
    write_index(checkpoint, {K_PROJ: "gone.safetensors"})
    with pytest.raises(ConfigError, match=r"gone\.safetensors"):
        load(checkpoint)


def test_a_truncated_file_is_refused_by_name(checkpoint: Path) -> None:
    content = (checkpoint / WEIGHTS).read_bytes()
    (checkpoint / WEIGHTS).write_bytes(content[: len(content) // 2])
    with pytest.raises(ConfigError, match=r"cannot read .*model\.safetensors"):
        load(checkpoint)


def test_a_checkpoint_with_only_pickle_files_is_refused_and_never_opened(checkpoint: Path) -> None:
    (checkpoint / WEIGHTS).rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"only pytorch_model\.bin, and pickle files can run code"):
        load(checkpoint)


def test_a_directory_with_only_gguf_is_refused_with_a_way_out(checkpoint: Path) -> None:
    (checkpoint / WEIGHTS).rename(checkpoint / "model-Q4_K_M.gguf")
    with pytest.raises(
        ConfigError, match=r"no model\.safetensors: .*model-Q4_K_M\.gguf is GGUF, which multilora-serve"
    ):
        load(checkpoint)


def write_index(path: Path, weight_map: dict[str, object]) -> None:
    """In the place of the one file."""
    (path / WEIGHTS).unlink()
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
