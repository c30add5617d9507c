"""Which tensor of a checkpoint belongs to which module: by the renamings that transformers applies when it loads."""

from __future__ import annotations

import re
from collections.abc import Iterable

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from multilora_engine.errors import ConfigError

_EXPERT = re.compile(r".+\.(\d+)\.[^.]+")
"""The number of an expert, in the name of one of its linears."""


class TensorNames:
    """The checkpoint's names of the tensors of a tree."""

    def __init__(self, tree: PreTrainedModel, tensor_names: Iterable[str]) -> None:
        """tensor_names: of the checkpoint. Raises ConfigError for a tensor that transformers makes others of."""
        transforms = get_model_conversion_mapping(tree)
        self._renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        self._converters = [one for one in transforms if isinstance(one, WeightConverter)]
        self._prefix = f"{tree.base_model_prefix}."
        self._modules = {name for name, _ in tree.named_modules()}
        self._ignored = [*(tree._keys_to_ignore_on_load_unexpected or ()), *_old_buffers(tree)]
        self._tensor_of: dict[str, str] = {}
        self._module_of: dict[str, str] = {}
        self._expert_of: dict[tuple[str, int, int], str] = {}
        for stored in tensor_names:
            stored_module, _, stored_leaf = stored.rpartition(".")
            # Also where a linear has other tensors than a weight, as one of codes has.
            name, converted = rename_source_key(f"{stored_module}.weight", self._renamings, self._converters)
            if converted is not None:
                self._note_expert(self._with_prefix(name), stored_module, converted)
                continue
            name = self._name_in_tree(stored)
            self._tensor_of.setdefault(name, stored)
            module, _, leaf = name.rpartition(".")
            if leaf == stored_leaf:
                self._module_of.setdefault(module, stored_module)

    def tensor(self, name: str) -> str:
        """The checkpoint's name of a tensor of the tree; that of the tree where the checkpoint has none."""
        return self._tensor_of.get(name, name)

    def module(self, name: str) -> str:
        """The checkpoint's name of a module whose tensors have names of their own, such as those of codes."""
        return self._module_of.get(name, name)

    def expert(self, name: str, expert: int, linear: int) -> str:
        """The checkpoint's name of one linear of an expert, whose tensor is a part of the tensor `name` of the tree."""
        return self._expert_of.get((name, expert, linear), f"{name}.{expert}.{linear}")

    def _note_expert(self, name: str, stored: str, pattern: str) -> None:
        """Keep the place of a linear of one expert. Raises ConfigError for a linear that is made into another form."""
        converter = next(one for one in self._converters if pattern in one.source_patterns)
        place = _EXPERT.fullmatch(stored)
        is_stacked = [type(one) for one in converter.operations] in ([MergeModulelist], [MergeModulelist, Concatenate])
        if place is None or not is_stacked or len(converter.target_patterns) != 1:
            raise ConfigError(
                f"tensors of {stored}: transformers makes others of them at the load, which is not served"
            )
        self._expert_of[name, int(place[1]), converter.source_patterns.index(pattern)] = stored

    def ignores(self, stored: str) -> bool:
        """Whether transformers passes a tensor over: its module computes it, or no longer has it."""
        return any(re.search(pattern, self._name_in_tree(stored)) for pattern in self._ignored)

    def _name_in_tree(self, stored: str) -> str:
        name, _ = rename_source_key(stored, self._renamings, self._converters)
        return self._with_prefix(name)

    def _with_prefix(self, name: str) -> str:
        """A checkpoint of the body alone lacks the prefix that the body has in the whole model, and the reverse."""
        if name.rpartition(".")[0] in self._modules:
            return name
        other = name.removeprefix(self._prefix) if name.startswith(self._prefix) else self._prefix + name
        return other if other.rpartition(".")[0] in self._modules else name


def _old_buffers(tree: PreTrainedModel) -> list[str]:
    """Buffers that old versions stored and that follow from the config, as transformers ignores them."""
    buffers = [name for name, _ in tree.named_buffers()]
    old = {r"rotary_emb\.inv_freq": "rotary_emb.inv_freq", r"(^|\.)position_ids$": "position_ids"}
    return [pattern for pattern, ending in old.items() if any(name.endswith(ending) for name in buffers)]
