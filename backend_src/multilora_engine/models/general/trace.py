"""One forward pass without numbers: which modules attend, to what and how, and which linears see each token once."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from multilora_engine.models.general.tree import MaskPattern, is_experts, pattern_of, set_attend, set_experts
from multilora_engine.out_of_memory import is_out_of_memory

NUM_TOKENS = 24

_LAYER = re.compile(r"(.+)\.(\d+)(?:\..+)?")
"""The list of layers and the number of the layer, in the name of a module."""

_KNOWN_OPTIONS = frozenset({"scaling", "softcap", "s_aux"})
"""The options of attention that ours has."""

_WITHOUT_EFFECT = frozenset({"dropout", "sliding_window", "position_ids", "is_causal", "training", "layer_idx"})
"""The options that change no answer: dropout is for training, the mask has the window, and positions were used."""


NO_INTERFACE = "its attention does not use transformers' interface for attention functions"
NO_POSITIONS = "it takes no positions of tokens"
NOT_BY_TOKEN = "it has layers without keys and values of each token (recurrent, linear or convolutional layers)"
OTHER_WIDTHS = "its keys and values have different widths (latent attention)"
OTHER_HEADS = "its layers have different heads"
OTHER_MASK = "its attention is neither to all tokens before nor to a window of the newest"
OTHER_ATTENTION = "its attention takes more than queries, keys and values"
OTHER_ORDER = "its layers do not attend once each, in their order"
OTHER_EXPERTS = "its experts are not gate, up and down with SiLU that each choose whole tokens"
UNTRACEABLE = "its modules cannot be traced"


class Unserved(Exception):
    """The modules do something that is not served. reason: one of a few. detail: what was found."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass(frozen=True)
class AttentionShape:
    """An attention module. name: in the tree. window: of keys, its own included; None is all."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None


@dataclass
class Trace:
    """body: the module that makes the rows for the head. layers_name: of the list of layers. attentions: by layer.

    linears: the names of the modules that see each token once a pass, with their inputs and outputs, in their order.
    groups: of neighbours among them that get the same tensor, such as q, k and v.
    """

    body: str
    layers_name: str
    attentions: list[AttentionShape]
    linears: dict[str, tuple[int, int]]
    groups: list[list[str]]


def trace(tree: PreTrainedModel, is_linear: Callable[[torch.nn.Module], bool], max_length: int) -> Trace:
    """Run the tree, whose attention is `TRACED`, once. max_length: of a sequence. Raises Unserved."""
    recorder = _Recorder(tree, is_linear, max_length)
    try:
        recorder.run()
    except Exception as error:  # whatever its modules raise
        if isinstance(error, Unserved) or is_out_of_memory(error):
            raise
        raise Unserved(UNTRACEABLE, f"{type(error).__name__}: {error}") from error
    return recorder.result()


class _Recorder:
    def __init__(self, tree: PreTrainedModel, is_linear: Callable[[torch.nn.Module], bool], max_length: int) -> None:
        self._tree = tree
        self._max_length = max_length
        self._names = {module: name for name, module in tree.named_modules()}
        self._is_linear = is_linear
        self._depth = 0
        self._body = ""
        self._attentions: list[AttentionShape] = []
        self._linears: dict[str, tuple[int, int]] = {}
        self._groups: list[list[str]] = []
        self._last_input: tuple[torch.Tensor, int] | None = None
        self._not_by_token: set[str] = set()

    def run(self) -> None:
        for name, module in self._tree.named_modules():
            set_attend(module, self._attend(name))
            if is_experts(module):
                set_experts(module, self._compute_experts)
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave)
        token_ids = torch.zeros(1, NUM_TOKENS, dtype=torch.int64, device="meta")
        # With a mask, since transformers looks for sequences side by side where there is none.
        inputs = {"attention_mask": torch.ones_like(token_ids), "use_cache": False}
        inputs["position_ids"] = torch.arange(NUM_TOKENS, device="meta").unsqueeze(0)
        if "position_ids" not in inspect.signature(type(self._tree).forward).parameters:
            raise Unserved(NO_POSITIONS)
        with torch.no_grad():
            self._tree(token_ids, **inputs)

    def result(self) -> Trace:
        if not self._attentions:
            raise Unserved(NO_INTERFACE)
        if not self._body:
            raise Unserved(UNTRACEABLE, "no module makes the rows of the head")
        layers_name = self._check_layers()
        linears = {name: sizes for name, sizes in self._linears.items() if name not in self._not_by_token}
        groups = [[name for name in group if name in linears] for group in self._groups]
        return Trace(self._body, layers_name, self._attentions, linears, [group for group in groups if group])

    def _check_layers(self) -> str:
        """The name of the list of layers. Each layer must attend once, all in the same shape."""
        places = [_LAYER.fullmatch(shape.name) for shape in self._attentions]
        lists = {place[1] if place else "" for place in places}
        if len(lists) != 1 or "" in lists:
            raise Unserved(OTHER_ORDER, f"attention is in {', '.join(sorted(lists))}")
        (layers_name,) = lists
        layers = [int(place[2]) for place in places if place]
        num_layers = len(self._tree.get_submodule(layers_name))  # type: ignore[arg-type]
        if repeated := [layer for layer, count in Counter(layers).items() if count > 1]:
            raise Unserved(OTHER_ORDER, f"layer {repeated[0]} attends more than once")
        if layers != list(range(num_layers)):
            if missing := sorted(set(range(num_layers)) - set(layers)):
                raise Unserved(NOT_BY_TOKEN, f"layer {missing[0]}")
            raise Unserved(OTHER_ORDER)
        shapes = {(shape.num_heads, shape.num_kv_heads, shape.head_dim) for shape in self._attentions}
        if len(shapes) > 1:
            raise Unserved(OTHER_HEADS, f"{sorted(shapes)} (heads, key-value heads, elements)")
        return layers_name

    def _enter(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        self._depth += 1
        if self._is_linear(module) and inputs:
            name, x = self._names[module], inputs[0]
            if name in self._linears or x.numel() != NUM_TOKENS * x.shape[-1]:
                self._not_by_token.add(name)
            self._linears[name] = (x.shape[-1], 0)
            if self._last_input is None or self._last_input[0] is not x or self._last_input[1] != x._version:
                self._groups.append([])
            self._groups[-1].append(name)
            self._last_input = (x, x._version)

    def _leave(self, module: torch.nn.Module, _inputs: tuple[Any, ...], output: Any) -> None:
        self._depth -= 1
        name = self._names[module]
        if self._depth == 1 and not self._body and hasattr(output, "last_hidden_state"):
            self._body = name
        if name in self._linears:
            self._linears[name] = (self._linears[name][0], output.shape[-1])

    def _attend(self, name: str) -> Callable[..., torch.Tensor]:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **options: Any) -> torch.Tensor:
            self._attentions.append(self._shape(name, q, k, v, mask, options))
            return q.new_empty(1, q.shape[2], q.shape[1], v.shape[3])

        return attend

    def _compute_experts(self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if x.dim() != 2 or len(x) != NUM_TOKENS or expert_ids.shape != weights.shape or len(expert_ids) != NUM_TOKENS:
            raise Unserved(OTHER_EXPERTS, f"tokens {list(x.shape)}, choices {list(expert_ids.shape)}")
        return torch.empty_like(x)

    def _shape(
        self, name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, options: Mapping[str, Any]
    ) -> AttentionShape:
        if any(x.dim() != 4 or x.shape[0] != 1 or x.shape[2] != NUM_TOKENS for x in (q, k, v)):
            raise Unserved(OTHER_ATTENTION, f"shapes are {[list(x.shape) for x in (q, k, v)]}")
        if k.shape != v.shape or q.shape[3] != k.shape[3]:
            raise Unserved(
                OTHER_WIDTHS, f"keys are {k.shape[1]} heads of {k.shape[3]}, values {v.shape[1]} of {v.shape[3]}"
            )
        for option, value in options.items():
            if option not in _KNOWN_OPTIONS | _WITHOUT_EFFECT and value is not None and value is not False:
                raise Unserved(OTHER_ATTENTION, option)
        return AttentionShape(name, q.shape[1], k.shape[1], q.shape[3], self._window(mask))

    def _window(self, mask: Any) -> int | None:
        pattern = pattern_of(mask)
        if pattern is None:
            raise Unserved(OTHER_MASK, "the mask is made in a way of its own")
        return window_of(pattern, self._max_length)


def window_of(pattern: MaskPattern, max_length: int) -> int | None:
    """The newest keys that a query attends to, its own included; None for all. Raises Unserved for other masks."""
    zero, keys, last = torch.tensor(0), torch.arange(max_length), max_length - 1
    window = max_length
    for query in (last, last - 1, last // 2, last // 3, 0):
        allowed = pattern(zero, zero, torch.tensor(query), keys).expand(max_length)
        window = int(allowed.sum()) if query == last else window
        if not torch.equal(allowed, (keys <= query) & (keys > query - window)):
            raise Unserved(OTHER_MASK)
    return None if window == max_length else window
