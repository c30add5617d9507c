"""`PackedExperts`: the weights of equal linears, one an expert, that a router chooses from."""

from __future__ import annotations

import torch

from multilora_kernels.cpu import panel_shape
from multilora_kernels.huge_pages import HugePages
from multilora_kernels.linear import PackedWeight, activation_dtype
from multilora_kernels.panels import Panels
from multilora_kernels.quantized import CodeType, QuantizedWeight


class PackedExperts:
    """The weights of `num_experts` linears, each [out_features, in_features], in the layout of their device.

    shape: [num_experts, out_features, in_features]. weight: all experts as one weight, one expert after another. If it
    is packed, each expert begins a panel, so that its bytes lie side by side and no other expert's lie between them.
    """

    def __init__(self, weight: PackedWeight | QuantizedWeight, num_experts: int, out_features: int) -> None:
        self.weight = weight
        self.shape = torch.Size((num_experts, out_features, weight.shape[1]))
        self._rows_of_expert = weight.shape[0] // num_experts

    @classmethod
    def empty(
        cls,
        num_experts: int,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        device: torch.device,
        compute_dtype: torch.dtype,
        pages: HugePages,
    ) -> PackedExperts:
        """Weights of floats. The arguments are those of `PackedWeight.empty`. `expert(e).copy_rows` fills expert e."""
        rows = num_experts * _whole_panels(out_features, activation_dtype(compute_dtype, device), device)
        weight = PackedWeight.empty(rows, in_features, dtype, device, compute_dtype, pages)
        return cls(weight, num_experts, out_features)

    @classmethod
    def of_codes(
        cls,
        num_experts: int,
        out_features: int,
        in_features: int,
        code_type: CodeType,
        group_size: int,
        scale_dtype: torch.dtype,
        device: torch.device,
        *,
        compute_dtype: torch.dtype = torch.float32,
        may_round: bool = False,
        pages: HugePages | None = None,
    ) -> PackedExperts:
        """Weights of codes. The arguments are those of `QuantizedWeight`. `expert(e).copy_rows` fills expert e."""
        rows = num_experts * _whole_panels(out_features, compute_dtype, device)
        weight = QuantizedWeight(
            rows,
            in_features,
            code_type,
            group_size,
            scale_dtype,
            device,
            compute_dtype=compute_dtype,
            may_round=may_round,
            pages=pages,
        )
        return cls(weight, num_experts, out_features)

    @property
    def nbytes(self) -> int:
        """Bytes of all experts, with what fills their last panels up."""
        return self.weight.data.nbytes if isinstance(self.weight, PackedWeight) else self.weight.nbytes

    @property
    def is_packed(self) -> bool:
        """Whether the weights are panels."""
        return self.weight.is_packed

    @property
    def panels(self) -> Panels:
        """The panels of all experts. Ask only when all experts are filled."""
        assert self.is_packed
        return self.weight.data if isinstance(self.weight, PackedWeight) else self.weight.panels

    def expert(self, index: int) -> PackedWeight | QuantizedWeight:
        """The weight [out_features, in_features] of one expert, in the memory of all of them."""
        assert 0 <= index < self.shape[0]
        return self.weight.part(index * self._rows_of_expert, self.shape[1])


def _whole_panels(out_features: int, dtype: torch.dtype, device: torch.device) -> int:
    """The outputs of whole panels that hold an expert. dtype: of activations, as both kinds of weights ask for it."""
    shape = panel_shape() if device.type == "cpu" and dtype == torch.float32 else None
    columns, lanes = shape or (1, 1)
    return -(-out_features // (columns * lanes)) * columns * lanes
