"""A transformers model as its checkpoint has it: every linear of every expert is a module of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

WEIGHTS = "model.safetensors"


@contextmanager
def checkpoint_modules(model: PreTrainedModel) -> Iterator[torch.nn.Module]:
    """Modules with the names and weights of the checkpoint. At the end the model gets their weights.

    They have `config` and `save_pretrained`, as the model has.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        model.save_pretrained(path)
        modules = _modules_of(model, load_file(path / WEIGHTS))
        yield modules
        modules.save_pretrained(path)
        model.load_state_dict(type(model).from_pretrained(path).state_dict())


def _modules_of(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    def save_pretrained(root: torch.nn.Module, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        state = {name: tensor.contiguous() for name, tensor in root.state_dict().items() if name in tensors}
        save_file(state, path / WEIGHTS, metadata={"format": "pt"})
        model.config.save_pretrained(path)

    # Libraries write the name of the class into config.json.
    members = {"config": model.config, "save_pretrained": save_pretrained}
    root: torch.nn.Module = type(type(model).__name__, (torch.nn.Module,), members)()
    for name, tensor in sorted(tensors.items(), key=lambda item: not item[0].endswith("weight")):
        path, _, kind = name.rpartition(".")
        parent, _, leaf = path.rpartition(".")
        if kind == "weight" and tensor.dim() == 2:
            is_embedding = leaf == "embed_tokens"
            rows, columns = tensor.shape
            module = torch.nn.Embedding(rows, columns) if is_embedding else torch.nn.Linear(columns, rows, bias=False)
            _child(root, parent).add_module(leaf, module)
        _child(root, path).register_parameter(kind, torch.nn.Parameter(tensor, requires_grad=False))
    return root


def _child(root: torch.nn.Module, path: str) -> torch.nn.Module:
    """The module at `path`, which is made where there is none."""
    module = root
    for name in filter(None, path.split(".")):
        if name not in module._modules:
            module.add_module(name, torch.nn.Module())
        module = module._modules[name]
    return module
