"""`multilora_wire.sites`: a model's description of itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from multilora_wire.module_names import MODULE_IDS
from multilora_wire.sites import ModelSites, SitePart, decoder_sites

GATED = decoder_sites(3, hidden_size=64, q_size=48, kv_size=16, intermediate_size=96)
PLAIN = decoder_sites(2, 64, 48, 16, 96, mlp_linears=("c_fc", "c_proj"))


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


@pytest.mark.parametrize("sites", [GATED, PLAIN])
def test_columns_count_up_without_gaps(sites: ModelSites) -> None:
    assert [site.column for site in sites.sites] == list(range(sites.num_columns))


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


def test_parts_cover_the_rows_of_a_module_one_behind_another() -> None:
    assert GATED.module_at[1, 0].parts == (SitePart(7, 0), SitePart(8, 48), SitePart(9, 64))
    assert GATED.module_at[1, 0].out_size == 80


def test_one_plain_module_stands_for_each_site() -> None:
    assert sorted(module.parts[0].column for module in GATED.plain_modules) == list(range(GATED.num_columns))


def test_a_description_travels_between_processes() -> None:
    assert GATED.num_columns == 21
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(GATED), type=ModelSites) == GATED


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
