"""`GeneralModel`: a decoder of transformers' modules, with linears, embeddings, head and attention of ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from transformers.pytorch_utils import Conv1D

from multilora_engine.batch.forward_batch import ForwardBatch, KVCache, TokenLoRAs
from multilora_engine.models.general.modules import (
    Body,
    CurrentStep,
    EmbeddingTable,
    Experts,
    Head,
    HeadRows,
    Linear,
    LinearGroup,
    PagedAttention,
    PlainLinear,
    Step,
    replace_embeddings,
)
from multilora_engine.models.general.tensor_names import TensorNames
from multilora_engine.models.general.tree import (
    PAGED,
    build_tree,
    is_experts,
    read_hf_config,
    set_attend,
    set_experts,
)
from multilora_engine.models.layers import Attend, LayerInputs
from multilora_engine.models.linear import LoRALinear
from multilora_engine.models.model import HiddenStates, KVGroup, kv_groups
from multilora_engine.models.model_config import GeneralDecoder, ModelConfig
from multilora_engine.models.rotary import Rotation
from multilora_engine.models.weights import (
    Destination,
    ExpertStack,
    LinearWeight,
    ReadablePlace,
    StoredPart,
    StoredWeight,
    VectorPlace,
    WeightFormat,
    WeightSwitch,
)
from multilora_wire.sites import GATED_MLP

_UNSET = -(2**31)
"""In a buffer of whole numbers, before transformers fills it."""


class GeneralModel:
    """`Model`'s methods over a tree of transformers' modules."""

    def __init__(
        self, config: ModelConfig, general: GeneralDecoder, weights: WeightFormat, tensor_names: Iterable[str]
    ) -> None:
        """tensor_names: of the checkpoint. Raises ConfigError."""
        self.config = config
        placement = weights.placement
        self.dtype, self.activation_dtype = placement.dtype, placement.activation_dtype
        self.adapter_sites = config.sites
        self.tree = build_tree(read_hf_config(general.checkpoint), placement.activation_dtype, PAGED)
        self.device = placement.device
        self._general, self._format = general, weights
        self._names = TensorNames(self.tree, tensor_names)
        self._tensors: dict[str, Destination] = {}
        self._weights: list[StoredWeight] = []
        self._current = CurrentStep()
        self._others = self._materialise()
        self._replace_outer()
        self._replace_linears()
        for layer, name in enumerate(general.attentions):
            window = config.sliding_window[layer]
            attention = PagedAttention(layer, window, placement.keeps_float32, self._current)
            set_attend(self.tree.get_submodule(name), attention.attend)
        self.body = self.tree.get_submodule(general.body)
        self._rows = Body(self._current)
        parent, _, name = general.body.rpartition(".")
        setattr(self.tree.get_submodule(parent), name, self._rows)

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        return kv_groups(self.config)

    @property
    def weight_bytes(self) -> dict[str, int]:
        num_bytes: Counter[str] = Counter()
        for weight in (*self._weights, *self._outer):
            num_bytes.update(weight.bytes_by_kind)
        for tensor in self._others:
            num_bytes[str(tensor.dtype).removeprefix("torch.")] += tensor.nbytes
        return dict(num_bytes.most_common())

    @property
    def weight_switches(self) -> list[WeightSwitch]:
        return [switch for weight in (*self._weights, self._head) for switch in weight.switches]

    def note_switch(self) -> None:
        """Each product asks its weight."""

    def checkpoint_tensors(self) -> dict[str, Destination]:
        return self._tensors

    def embedding_rows(self) -> ReadablePlace | None:
        return self._embeddings.readable()

    def ignores(self, name: str) -> bool:
        return self._names.ignores(name)

    def limit_length(self, max_model_len: int) -> None:
        """The modules compute their angles in each step."""

    def forward(
        self, batch: ForwardBatch, kv_cache: KVCache, on_layer: Callable[[], None] = lambda: None
    ) -> torch.Tensor:
        return self.logits(self.hidden_states(batch, kv_cache, on_layer), batch.logits_indices, batch.lora)

    def hidden_states(
        self,
        batch: ForwardBatch,
        kv_cache: KVCache,
        on_layer: Callable[[], None] = lambda: None,
        attend: Attend | None = None,
    ) -> HiddenStates:
        assert attend is None, "steps of transformers' modules are not captured in pieces"
        self._current.step = Step(
            batch,
            kv_cache,
            {window: batch.sequences(window) for window in set(self.config.sliding_window)},
            Rotation.none(batch, self.activation_dtype),
            batch.lora_batch(),
            on_layer,
        )
        try:
            rows = self.run_body(batch.input_ids, batch.positions)
        finally:
            self._current.step = None
        return rows, rows.new_zeros(()).expand_as(rows)

    def run_body(self, token_ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """The rows for the head, [num_tokens, hidden_size].

        token_ids: [num_tokens] int64. positions: the same; None for a whole sequence, whose modules count themselves.
        """
        position_ids = None if positions is None else positions.unsqueeze(0)
        output = self.body(input_ids=token_ids.unsqueeze(0), position_ids=position_ids, use_cache=False)
        self._rows.output_class = type(output)
        rows: torch.Tensor = output.last_hidden_state
        return rows[0]

    def attention_inputs(self, batch: ForwardBatch) -> LayerInputs:
        raise AssertionError("steps of transformers' modules are not captured in pieces")

    def logits(
        self,
        hidden_states: HiddenStates,
        rows: torch.Tensor,
        lora: TokenLoRAs | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        chosen = hidden_states[0].index_select(0, rows)
        mapping = None if lora is None else lora.mapping.index_select(0, rows)
        self._current.head = HeadRows(chosen, lora, mapping)
        try:
            # The ids are not read: the body has run.
            logits: torch.Tensor = self.tree(input_ids=rows.unsqueeze(0), use_cache=False).logits
        finally:
            self._current.head = None
        return logits[0].float() if out is None else out.copy_(logits[0])

    @property
    def _outer(self) -> list[LinearWeight]:
        return list({id(weight): weight for weight in (self._head, self._embeddings)}.values())

    def _replace_outer(self) -> None:
        """Put our embeddings and head into the tree. They are one weight where they are tied."""
        general, config = self._general, self.config
        embeddings, head = (self.tree.get_submodule(name) for name in (general.embeddings, general.head))
        assert isinstance(embeddings, torch.nn.Embedding)
        assert isinstance(head, torch.nn.Linear)
        of_embeddings, of_head = (
            StoredPart(self._names.module(name), 0, config.vocab_size) for name in (general.embeddings, general.head)
        )
        self._head = self._format.head(of_embeddings if config.tie_word_embeddings else of_head, head.in_features)
        self._embeddings = (
            self._head
            if config.tie_word_embeddings
            else self._format.embeddings(of_embeddings, embeddings.embedding_dim)
        )
        for weight in self._outer:
            self._tensors.update(weight.checkpoint_tensors())
        sites, current = self.adapter_sites, self._current
        replace_embeddings(embeddings, EmbeddingTable(self._embeddings, self.activation_dtype, sites, current))
        bias = None
        if head.bias is not None:
            bias = self._format.placement.vectors(head.out_features)
            self._tensors[self._names.tensor(f"{general.head}.bias")] = VectorPlace(bias)
        self._put(general.head, Head(self._head, bias, self.activation_dtype, sites, current))

    def _replace_linears(self) -> None:
        sites = {self.adapter_sites.full_name(site.name): site for site in self.adapter_sites.sites}
        for names in self._general.groups:
            weight, bias = self._linear(names)
            group = LinearGroup(LoRALinear([sites[name] for name in names], weight, bias), self._current)
            for index, name in enumerate(names):
                self._put(name, Linear(group, index, self.activation_dtype))
        for name, module in list(self.tree.named_modules()):
            if is_experts(module):
                columns = [site.column for n in GATED_MLP if (site := sites.get(f"{name}.{n}")) is not None]
                self._replace_experts(name, module, columns)
            elif is_linear(module):
                self._put(name, PlainLinear(*self._linear([name]), self.activation_dtype))

    def _replace_experts(self, name: str, module: torch.nn.Module, columns: Sequence[int]) -> None:
        """Let a module of experts compute by ours, and drop its own parameters. columns: as of `Experts`."""
        weights = []
        for leaf, linears in (("gate_up_proj", 2), ("down_proj", 1)):
            num_experts, out_features, in_features = getattr(module, leaf).shape
            count = out_features // linears
            parts = [
                [StoredPart(self._names.expert(f"{name}.{leaf}", e, n), n * count, count) for n in range(linears)]
                for e in range(num_experts)
            ]
            stack = ExpertStack(self._names.tensor(f"{name}.{leaf}"))
            weights.append(self._format.experts(parts, in_features, stack))
            self._tensors.update(weights[-1].checkpoint_tensors())
            delattr(module, leaf)
        self._weights += weights
        gate_up, down = weights
        set_experts(module, Experts(gate_up, down, columns, self._current).compute)

    def _linear(self, names: Sequence[str]) -> tuple[LinearWeight, torch.Tensor | None]:
        """The weight of some linears, one after another, and their biases."""
        modules = [self.tree.get_submodule(name) for name in names]
        sizes = [linear_sizes(module) for module in modules]
        starts = [0, *accumulate(out_features for _, out_features in sizes)]
        parts = [
            StoredPart(self._names.module(name), start, out_features)
            for name, start, (_, out_features) in zip(names, starts, sizes, strict=False)
        ]
        weight = self._format.linear(parts, sizes[0][0])
        self._weights.append(weight)
        places = weight.checkpoint_tensors()
        for part, module in zip(parts, modules, strict=True):
            key = f"{part.name}.weight"
            if isinstance(module, Conv1D) and key in places:
                places = {**places, key: TransposedPlace(places[key])}
        self._tensors.update(places)
        if all(module.bias is None for module in modules):
            return weight, None
        bias = self._format.placement.vectors(starts[-1]).zero_()
        for name, part, module in zip(names, parts, modules, strict=True):
            if module.bias is not None:
                place = VectorPlace(bias[part.first : part.first + part.count])
                self._tensors[self._names.tensor(f"{name}.bias")] = place
        return weight, bias

    def _put(self, name: str, module: torch.nn.Module) -> None:
        parent, _, child = name.rpartition(".")
        setattr(self.tree.get_submodule(parent), child, module)

    def _materialise(self) -> list[torch.Tensor]:
        """Give memory to all tensors but those of linears and embeddings, and let transformers compute the unstored.

        Returns the stored ones.
        """
        stored: list[torch.Tensor] = []
        computed: list[tuple[str, torch.Tensor]] = []
        outer = {self.tree.get_submodule(name) for name in (self._general.embeddings, self._general.head)}
        for module_name, module in self.tree.named_modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if not is_linear(module) and not is_experts(module) and module not in outer:
                    values = torch.empty_like(parameter, device=self.device)
                    parameter = torch.nn.Parameter(values, requires_grad=False)
                    module.register_parameter(name, parameter)
                    stored.append(self._store(module_name, name, parameter.data))
                parameter._is_hf_initialized = True
            for name, buffer in list(module.named_buffers(recurse=False)):
                is_computed = name in module._non_persistent_buffers_set
                unset = torch.nan if buffer.is_floating_point() else _UNSET
                values = torch.full_like(buffer, unset if buffer.dtype != torch.bool else False, device=self.device)
                module.register_buffer(name, values, persistent=not is_computed)
                if is_computed:
                    computed.append((f"{module_name}.{name}", values))
                else:
                    values._is_hf_initialized = True  # type: ignore[attr-defined]
                    stored.append(self._store(module_name, name, values))
        self.tree.initialize_weights()
        for name, values in computed:
            is_unset = values.isnan() if values.is_floating_point() else values == _UNSET
            assert not is_unset.any(), f"transformers computes no {name}"
        return stored

    def _store(self, module_name: str, name: str, values: torch.Tensor) -> torch.Tensor:
        full_name = f"{module_name}.{name}" if module_name else name
        self._tensors[self._names.tensor(full_name)] = VectorPlace(values)
        return values


@dataclass(frozen=True)
class TransposedPlace:
    """The place of a matrix that the checkpoint has transposed, as GPT-2's."""

    place: Destination

    @property
    def shape(self) -> torch.Size:
        return torch.Size(reversed(self.place.shape))

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        return self.place.dtypes

    def copy_(self, values: torch.Tensor) -> None:
        self.place.copy_(values.t().contiguous())


def is_linear(module: torch.nn.Module) -> bool:
    """Whether a module of transformers' is a plain linear; a class that does more stays as it is."""
    return type(module) in (torch.nn.Linear, Conv1D)


def linear_sizes(module: torch.nn.Module) -> tuple[int, int]:
    """Inputs and outputs of a plain linear."""
    if isinstance(module, Conv1D):
        return module.nx, module.nf
    assert isinstance(module, torch.nn.Linear)
    return module.in_features, module.out_features
