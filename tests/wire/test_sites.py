"""`multilora_wire.sites`: a model's description of itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from multilora_wire.config_sites import config_sites
from multilora_wire.layout import adapter_layout, num_values
from multilora_wire.module_names import MODULE_IDS
from multilora_wire.sites import (
    PLAIN_MLP,
    ModelSites,
    SitePart,
    attention_shapes,
    decoder_sites,
    expert_shapes,
    mlp_shapes,
    model_sites,
    shared_expert_shapes,
)

GATED = decoder_sites(3, hidden_size=64, q_size=48, kv_size=16, intermediate_size=96)
PLAIN = decoder_sites(2, 64, 48, 16, 96, PLAIN_MLP)
ATTENTION = attention_shapes(64, 48, 16)
MIXED = model_sites(
    [
        ATTENTION + expert_shapes(64, expert_size=24, num_experts=5),
        ATTENTION + mlp_shapes(64, 96),
        ATTENTION + expert_shapes(64, expert_size=24, num_experts=5) + shared_expert_shapes(64, shared_size=40),
    ],
    hidden_size=64,
    vocab_size=200,
)
"""A sparse layer, a dense one, and a sparse one with a shared expert."""


def _shapes(sites: ModelSites, layer: int) -> dict[str, tuple[int, int]]:
    return {site.name: (site.in_size, site.out_size) for site in sites.sites if site.layer == layer}


def test_a_gated_decoder_has_seven_sites_a_layer_under_hugging_faces_names() -> None:
    assert _shapes(GATED, 2) == {
        "layers.2.self_attn.q_proj": (64, 48),
        "layers.2.self_attn.k_proj": (64, 16),
        "layers.2.self_attn.v_proj": (64, 16),
        "layers.2.self_attn.o_proj": (48, 64),
        "layers.2.mlp.gate_proj": (64, 96),
        "layers.2.mlp.up_proj": (64, 96),
        "layers.2.mlp.down_proj": (96, 64),
    }


def test_a_plain_mlp_has_two_sites_and_neither_gate_nor_fused_modules() -> None:
    assert [name for name in _shapes(PLAIN, 1) if "mlp" in name] == ["layers.1.mlp.c_fc", "layers.1.mlp.c_proj"]
    assert list(PLAIN.module_names) == [0, 1, 2, 3, 4, 5, 6]


def test_layers_may_be_sparse_or_dense() -> None:
    assert _shapes(MIXED, 1) == {name.replace("layers.2", "layers.1"): size for name, size in _shapes(GATED, 2).items()}
    sparse = {name.removeprefix("layers.2."): size for name, size in _shapes(MIXED, 2).items() if ".mlp." in name}
    assert sparse == {
        "mlp.gate": (64, 5),
        "mlp.experts.gate_proj": (64, 24),
        "mlp.experts.up_proj": (64, 24),
        "mlp.experts.down_proj": (24, 64),
        "mlp.shared_expert.gate_proj": (64, 40),
        "mlp.shared_expert.up_proj": (64, 40),
        "mlp.shared_expert.down_proj": (40, 64),
        "mlp.shared_expert_gate": (64, 1),
    }


def test_a_layer_has_the_modules_of_its_linears_and_no_others() -> None:
    modules = {layer: [m.module_id for m in MIXED.modules if m.layer == layer] for layer in range(3)}
    attention = [0, 1, 2, 3, 4]
    assert modules == {
        0: [*attention, 13, 14, 15, 16],
        1: [*attention, 5, 6, 7, 18],
        2: [*attention, 13, 14, 15, 16, 17, 19, 20, 21],
    }


def test_names_of_experts_cross_as_upstreams_do() -> None:
    """13 is the linear under the activation, 15 the one beside; 21 is the shared expert's `up_proj`, 17 its gate."""
    names = {i: MIXED.site_at[MIXED.module_at[2, i].parts[0].column].name for i in (13, 14, 15, 16, 17, 19, 20, 21)}
    assert {i: name.removeprefix("layers.2.mlp.") for i, name in names.items()} == {
        13: "experts.gate_proj",
        14: "experts.down_proj",
        15: "experts.up_proj",
        16: "gate",
        17: "shared_expert_gate",
        19: "shared_expert.gate_proj",
        20: "shared_expert.down_proj",
        21: "shared_expert.up_proj",
    }
    assert MIXED.module_names[21] == "shared_expert_gate"
    assert MIXED.module_names[17] == "mlp_router"


def test_a_row_of_experts_has_the_values_of_all_of_them() -> None:
    assert MIXED.module_at[0, 13].experts == 5
    assert num_values(MIXED.module_at[0, 13], rank=3) == 5 * 3 * (64 + 24)
    assert num_values(MIXED.module_at[0, 16], rank=3) == 3 * (64 + 5)


@pytest.mark.parametrize(
    ("sites", "expected"),
    [
        (GATED, "3396fd9459b21bcb5f61421430cdf60d8551188cd0e776c97ac733a483692cc9"),
        (PLAIN, "404f128c9cd30466122afe00ace56698996dc4d33f7b02043a5ba85f47bc1d27"),
    ],
)
def test_models_without_experts_keep_the_fingerprints_that_adapters_on_disk_have(
    sites: ModelSites, expected: str
) -> None:
    assert adapter_layout(sites, 64, "float32").fingerprint == expected


def test_models_that_differ_in_their_experts_have_other_fingerprints() -> None:
    def fingerprint(num_experts: int) -> str:
        sites = model_sites([ATTENTION + expert_shapes(64, 24, num_experts)], 64)
        return adapter_layout(sites, 64, "float32").fingerprint

    assert len({fingerprint(num_experts) for num_experts in (1, 2, 5)}) == 3


@pytest.mark.parametrize("sites", [GATED, PLAIN, MIXED])
def test_columns_count_up_without_gaps(sites: ModelSites) -> None:
    columns = [site.column + expert for site in sites.all_sites for expert in range(site.experts)]
    assert columns == list(range(sites.num_columns))


@pytest.mark.parametrize(
    ("module_id", "expected"),
    [
        (0, ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
        (5, ["mlp.gate_proj"]),
        (7, ["mlp.up_proj"]),
        (18, ["mlp.up_proj", "mlp.gate_proj"]),
    ],
)
def test_a_wire_module_names_its_sites_in_the_order_of_upstreams_rows(module_id: int, expected: list[str]) -> None:
    module = GATED.module_at[1, module_id]
    assert [GATED.site_at[part.column].name for part in module.parts] == [f"layers.1.{path}" for path in expected]


def test_parts_cover_the_rows_of_a_module_one_after_another() -> None:
    assert GATED.module_at[1, 0].parts == (SitePart(7, 0), SitePart(8, 48), SitePart(9, 64))
    assert GATED.module_at[1, 0].out_size == 80


@pytest.mark.parametrize("sites", [GATED, PLAIN, MIXED])
def test_one_plain_module_stands_for_each_site(sites: ModelSites) -> None:
    assert sorted(module.parts[0].column for module in sites.plain_modules) == [site.column for site in sites.sites]


@pytest.mark.parametrize("sites", [GATED, MIXED])
def test_a_description_travels_between_processes(sites: ModelSites) -> None:
    assert GATED.num_columns == 21
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sites), type=ModelSites) == sites


def test_the_package_needs_neither_torch_nor_the_client() -> None:
    """Fronts import it, and so does the engine, which runs without the client's packages."""
    folder = Path(sys.modules["multilora_wire"].__path__[0])
    modules = [f"multilora_wire.{path.stem}" for path in folder.glob("[a-z]*.py")]
    code = f"import sys, {', '.join(modules)}\nprint([m for m in sys.modules if m.partition('.')[0] in sys.argv[1:]])"
    banned = ["torch", "tritonclient", "multilora_client", "multilora_engine", "multilora_kernels", "transformers"]
    done = subprocess.run([sys.executable, "-c", code, *banned], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("sites", [GATED, PLAIN])
def test_hugging_faces_names_lead_to_the_modules_of_their_sites(sites: ModelSites) -> None:
    for module in sites.plain_modules:
        _, _, path = sites.site_at[module.parts[0].column].name.split(".", 2)
        assert MODULE_IDS[path] == module.module_id


SPARSE = model_sites(
    [
        [*attention_shapes(64, 48, 16), *mlp_shapes(64, 96)],
        [*attention_shapes(64, 48, 16), *expert_shapes(64, 32, 6), *shared_expert_shapes(64, 80)],
    ],
    hidden_size=64,
    vocab_size=100,
    is_tied=True,
)


def test_sites_are_restricted_to_the_linears_of_named_modules() -> None:
    restricted = SPARSE.restricted_to(["attn_qkv", "moe_gate"])
    assert restricted.sites == SPARSE.sites
    assert (restricted.num_columns, restricted.num_layers) == (SPARSE.num_columns, 2)
    expected = [(layer, module_id) for layer in (0, 1) for module_id in (0, 1, 2, 3)] + [(1, 15)]
    assert [(module.layer, module.module_id) for module in restricted.modules] == expected
    assert restricted.outer_modules == ()
    assert restricted.left_out_at.keys() == SPARSE.module_at.keys() - set(expected)
    assert msgspec.json.decode(msgspec.json.encode(restricted), type=ModelSites) == restricted


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["attn_q"], []),
        (["attn_q", "lm_head"], ["lm_head", "lm_head rows", "token rows"]),
        (["embed_tokens"], ["embed_tokens", "embed_tokens rows", "token rows"]),
        (["embed_tokens", "lm_head"], [module.name for module in SPARSE.outer_modules]),
    ],
)
def test_rows_of_tokens_belong_to_the_matrix_that_they_change(names: list[str], expected: list[str]) -> None:
    assert [module.name for module in SPARSE.restricted_to(names).outer_modules] == expected


def test_a_module_that_the_model_has_not_restricts_nothing() -> None:
    with pytest.raises(KeyError, match="mamba_in_proj"):
        SPARSE.restricted_to(["attn_q", "mamba_in_proj"])


def test_layers_of_two_stacks_have_one_row_of_numbers() -> None:
    fields = {"model_type": "t5", "d_model": 64, "d_kv": 8, "num_heads": 4, "d_ff": 96, "num_layers": 2}
    sites = config_sites(fields | {"num_decoder_layers": 3})
    assert sites.full_name("layers.2.layer.1.EncDecAttention.q") == "decoder.block.2.layer.1.EncDecAttention.q"
    assert sites.full_name("layers.3.layer.0.SelfAttention.q") == "encoder.block.0.layer.0.SelfAttention.q"
    assert [sites.layers_in(stack) for stack in sites.stacks] == [3, 2]
    cross = sites.module_at[0, 8]
    assert [sites.site_at[part.column].name.rsplit(".", 1)[1] for part in cross.parts] == ["q", "k", "v"]
    assert "layers.3.layer.0.SelfAttention.v" in sites.module_named
    other = config_sites(fields | {"num_layers": 3, "num_decoder_layers": 2})
    fingerprints = {adapter_layout(each, 64, "float32").fingerprint for each in (sites, other)}
    assert len(fingerprints) == 2
