"""An adapter fits a model exactly when both sides of every matrix do, whatever the flat rows look like."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multilora_wire.adapter_origin import AdaptedLinear, AdapterOrigin, WrongBaseModel
from multilora_wire.sites import ModelSites, decoder_sites

SIDES = st.fixed_dictionaries(
    {
        name: st.integers(1, 4).map(lambda n: 16 * n)
        for name in ("hidden_size", "q_size", "kv_size", "intermediate_size")
    }
)


def origin_of(sites: ModelSites, base_model: str = "") -> AdapterOrigin:
    linears = (
        AdaptedLinear(f"model.layers.{m.layer}", m.module_id, m.layer, m.in_size, m.out_size) for m in sites.modules
    )
    return AdapterOrigin(tuple(linears), base_model)


@given(SIDES, SIDES, st.integers(1, 3), st.integers(1, 3))
def test_it_fits_a_model_of_the_same_sides_and_no_other(
    there: dict[str, Any], here: dict[str, Any], layers_there: int, layers_here: int
) -> None:
    origin, sites = origin_of(decoder_sites(layers_there, **there)), decoder_sites(layers_here, **here)
    assert origin.fits(sites) == (there == here and layers_there <= layers_here)
    if not origin.fits(sites):
        with pytest.raises(WrongBaseModel, match=r"model\.layers\.\d (has|is)"):
            origin.check(sites)


LLAMA = decoder_sites(3, 64, 64, 32, 96)
PLAIN = decoder_sites(3, 64, 64, 32, 96, mlp_linears=("c_fc", "c_proj"))


@pytest.mark.parametrize(
    ("linear", "sites", "message"),
    [
        (
            AdaptedLinear("model.layers.0.self_attn.q_proj", 1, 0, 48, 80),
            LLAMA,
            "the adapter was made for acme/other, not for tiny: model.layers.0.self_attn.q_proj has 48 inputs and 80 "
            "outputs there, 64 inputs and 64 outputs here",
        ),
        (
            AdaptedLinear("model.layers.3.self_attn.q_proj", 1, 3, 64, 64),
            LLAMA,
            "the adapter was made for acme/other, not for tiny: model.layers.3.self_attn.q_proj is a layer there, and "
            "the model here has 3 layers",
        ),
        (
            AdaptedLinear("model.layers.0.mlp.up_proj", 7, 0, 64, 96),
            PLAIN,
            "the adapter was made for acme/other, not for tiny: model.layers.0.mlp.up_proj is a linear there, and "
            "layer 0 here has q_proj, k_proj, v_proj, o_proj, c_fc, c_proj",
        ),
    ],
)
def test_the_error_names_both_models_the_module_and_its_sides(
    linear: AdaptedLinear, sites: ModelSites, message: str
) -> None:
    with pytest.raises(WrongBaseModel) as caught:
        AdapterOrigin((linear,), "acme/other").check(sites, "tiny")
    assert str(caught.value) == message


def test_names_that_are_unknown_are_left_out() -> None:
    with pytest.raises(WrongBaseModel, match=r"^the adapter was made for another base model, not for the model here: "):
        origin_of(decoder_sites(1, 48, 80, 32, 96)).check(LLAMA)
    with pytest.raises(WrongBaseModel) as caught:
        origin_of(decoder_sites(1, 48, 80, 32, 96), "x" * 5000).check(LLAMA)
    assert len(str(caught.value)) < 500
