"""`AdapterOrigin`: the model that an adapter was made for, as far as the adapter's own files tell.

A row of the wire is flat: A `[4, 48]` with B `[80, 4]` has as many values as A `[4, 64]` with B `[64, 4]`. So the sides
of both matrices are kept beside the rows, and compared with the sites of the model that the adapter meets.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from multilora_wire.messages import shown
from multilora_wire.sites import ModelSites


class WrongBaseModel(Exception):
    """An adapter was made for another model; the text names the module, the adapter's sides and the model's."""

    @classmethod
    def of(cls, base_model: str, model: str, difference: str) -> WrongBaseModel:
        """base_model: the name that the adapter gives its model. model: the name of the one that it met."""
        made_for = shown(base_model) or "another base model"
        return cls(f"the adapter was made for {made_for}, not for {model or 'the model here'}: {difference}")


class AdaptedLinear(msgspec.Struct, frozen=True):
    """A linear that an adapter changes, by A `[rank, in_size]` and B `[out_size, rank]`.

    name: the module's name in the adapter's model, such as `model.layers.3.self_attn.q_proj`.
    """

    name: str
    module_id: int
    layer: int
    in_size: int
    out_size: int


class AdapterOrigin(msgspec.Struct, frozen=True):
    """linears: in the order of the adapter's rows. base_model: the name that the adapter gives its model, or ""."""

    linears: tuple[AdaptedLinear, ...]
    base_model: str = ""

    def describes(self, config: Sequence[Sequence[int]]) -> bool:
        """Whether the linears are those of these rows of `lora_config`."""
        return [(linear.module_id, linear.layer) for linear in self.linears] == [(row[0], row[1]) for row in config]

    def fits(self, sites: ModelSites) -> bool:
        """Whether both sides of every matrix are those of a model with these sites."""
        return not any(_difference(linear, sites) for linear in self.linears)

    def check(self, sites: ModelSites, model: str = "") -> None:
        """Compare both sides of every matrix with those of a model. model: its name, "" if it is not known.

        Raises WrongBaseModel.
        """
        for linear in self.linears:
            if difference := _difference(linear, sites):
                raise WrongBaseModel.of(self.base_model, model, difference)


def _difference(linear: AdaptedLinear, sites: ModelSites) -> str:
    """The difference between the adapter's model and one with these sites; "" where there is none."""
    place = (linear.layer, linear.module_id)
    module = sites.module_at.get(place) or sites.left_out_at.get(place)
    if module is not None:
        there, here = (linear.in_size, linear.out_size), (module.in_size, module.out_size)
        name = sites.full_name_of(module) if sites.has_encoder else None
        if name is not None and name != linear.name:
            return f"{linear.name} is layer {linear.layer} there, and layer {linear.layer} here has {name}"
        return "" if there == here else f"{linear.name} has {_sides(*there)} there, {_sides(*here)} here"
    return describe_missing(linear.name, linear.layer, sites)


def describe_missing(name: str, layer: int, sites: ModelSites) -> str:
    """The difference between a model with the linear `name` in `layer` and one without, which has these sites."""
    if not 0 <= layer < sites.num_layers:
        return f"{name} is a layer there, and the model here has {sites.num_layers} layers"
    # Of `layers.3.mlp.experts.up_proj` this is `experts.up_proj`. Names of self and cross attention differ before that.
    num_parts = 2 if sites.has_encoder else 3
    names = [site.name.split(".", num_parts)[-1] for site in sites.sites if site.layer == layer]
    where = sites.full_name(f"layers.{layer}") if sites.has_encoder else f"layer {layer}"
    return f"{name} is a linear there, and {where} here has {', '.join(names)}"


def _sides(in_size: int, out_size: int) -> str:
    return f"{in_size} inputs and {out_size} outputs"
