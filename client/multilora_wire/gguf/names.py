"""GGUF's names of the tensors of the decoders that are served, and Hugging Face's.

llama.cpp's converter (`convert_hf_to_gguf.py`, `gguf-py/gguf/tensor_mapping.py`) changes some tensors besides: it
exchanges rows of queries and keys, whose pairs turn as neighbours in its own Llama, and adds one to Gemma's norms.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_LAYER = re.compile(r"blk\.([0-9]{1,6})\.(\w+)\.(weight|bias)", re.ASCII)
_OUTER = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}

_ATTENTION = {f"attn_{name}": f"self_attn.{name}_proj" for name in ("q", "k", "v")} | {
    "attn_output": "self_attn.o_proj"
}
_MLP = {f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_LLAMA = {**_ATTENTION, **_MLP, "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_GEMMA = {
    **_LLAMA,
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class TensorNames:
    """The names of one of GGUF's architectures. modules: of a layer, Hugging Face's by GGUF's.

    exchanges_rows: whether queries and keys lie as neighbours turn. adds_one: whether norms are stored with one added.
    """

    modules: Mapping[str, str]
    exchanges_rows: bool = False
    adds_one: bool = False

    def hugging_face(self, name: str) -> str | None:
        """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; None for a name that nobody knows."""
        if (found := _LAYER.fullmatch(name)) and (module := self.modules.get(found[2])):
            return f"model.layers.{int(found[1])}.{module}.{found[3]}"
        module, _, kind = name.rpartition(".")
        return f"{_OUTER[module]}.{kind}" if module in _OUTER and kind in ("weight", "bias") else None

    def heads_of_rows(self, name: str, num_heads: int, num_kv_heads: int) -> int:
        """The heads whose rows the tensor `name`, Hugging Face's, has exchanged; 0 for a tensor that lies as it is."""
        if not self.exchanges_rows:
            return 0
        return num_heads if ".q_proj." in name else num_kv_heads if ".k_proj." in name else 0

    def has_one_added(self, name: str) -> bool:
        """Whether one is added to the tensor `name`, Hugging Face's."""
        return self.adds_one and name.endswith("norm.weight")


def row_order(num_rows: int, num_heads: int) -> npt.NDArray[np.int64]:
    """The rows of a file in the order of Hugging Face: the two halves of a head lie row by row in the file."""
    rows = np.arange(num_rows).reshape(num_heads, num_rows // num_heads // 2, 2)
    return rows.swapaxes(1, 2).reshape(num_rows)


ARCHITECTURES: Mapping[str, TensorNames] = {
    "llama": TensorNames(_LLAMA, exchanges_rows=True),
    "qwen2": TensorNames(_LLAMA),
    "qwen3": TensorNames({**_LLAMA, **_HEAD_NORMS}),
    "granite": TensorNames(_LLAMA, exchanges_rows=True),
    "smollm3": TensorNames(_LLAMA, exchanges_rows=True),
    "gemma2": TensorNames(_GEMMA, adds_one=True),
    "gemma3": TensorNames({**_GEMMA, **_HEAD_NORMS}, adds_one=True),
    "phi3": TensorNames({**_LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "olmo2": TensorNames(
        {
            **_ATTENTION,
            **_MLP,
            **_HEAD_NORMS,
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        }
    ),
    "glm4": TensorNames(
        {
            **_LLAMA,
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        }
    ),
    "cohere2": TensorNames({**_ATTENTION, **_MLP, "attn_norm": "input_layernorm"}),
    "starcoder2": TensorNames({**_LLAMA, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
}
"""By `general.architecture`."""
