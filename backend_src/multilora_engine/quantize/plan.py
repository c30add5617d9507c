"""Decides which tensors of a checkpoint become codes, and checks the checkpoint, before anything is computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from compressed_tensors.utils import match_named_modules
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from multilora_engine.errors import ConfigError
from multilora_engine.models.checkpoint import Checkpoint, checkpoint_files, opened
from multilora_engine.models.model_config import EMBEDDINGS, read_json
from multilora_engine.models.registry import read_model_config
from multilora_engine.quantize.schemes import EMBEDDINGS_OF_8_BITS, HEAD, HEAD_OF_8_BITS, LINEAR, PER_OUTPUT, Scheme

_GROUP_SIZES = (128, 64, 32)
_FLOAT_DTYPES = ("F32", "BF16", "F16")
_REFUSALS = (StrictDataclassError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""The errors by which transformers' configs and modules refuse values of config.json."""

Head = Literal["w8a16", "same", "none"]
"""8 bits with a scale an output, the scheme of the other linears, or floats."""


@dataclasses.dataclass(frozen=True)
class OuterOptions:
    """How the head and the embeddings are stored.

    has_coded_embeddings: whether embeddings become 8-bit codes with a scale for each token; else they stay floats.
    """

    head: Head = "w8a16"
    has_coded_embeddings: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which modules of a checkpoint become codes, and how.

    source: the checkpoint.
    schemes: the schemes of the modules that become codes, by transformers' names. Their tensors are `<module>.weight`.
    linears: the scheme of most linears. others: the modules with another scheme; None for modules that stay floats.
    unties_head: whether the head, which was the embeddings, becomes a tensor of its own. compressed-tensors has no tied
        codes.
    """

    source: Path
    linears: Scheme
    others: Mapping[str, Scheme | None]
    schemes: Mapping[str, Scheme]
    unties_head: bool

    def stays(self, tensor: str) -> bool:
        """Whether a tensor is written as it is."""
        return tensor.removesuffix(".weight") not in self.schemes

    def modules_made_of(self, tensor: str) -> list[str]:
        """The modules whose codes are made of this tensor."""
        module = tensor.removesuffix(".weight")
        made = [module] if module != tensor and module in self.schemes else []
        if not self.unties_head or module not in (EMBEDDINGS, HEAD):
            return made
        return [*made, HEAD] if module == EMBEDDINGS else []


def make_plan(source: Path, scheme: Scheme, options: OuterOptions) -> Plan:
    """The plan for a checkpoint.

    Raises ConfigError if the checkpoint is quantised or of a family that the engine does not serve, if a matrix is
    missing, has another shape or belongs to no linear or embedding, if a tied head differs from the embeddings, or if
    the group size does not divide the inputs of all linears.
    """
    config = read_model_config(source)
    if config.encoder is not None:
        raise ConfigError(f"{source} is a model with an encoder ({config.architecture}); these are served as they are")
    is_tied = config.tie_word_embeddings
    _refuse_quantized(source)
    if is_tied and options.has_coded_embeddings and options.head == "none":
        raise ConfigError(f"{source}: its head is its embeddings; leave --head none or --embeddings w8a16 out")
    model = _empty_model(source)
    linears = [name for name, _ in match_named_modules(model, [LINEAR], () if options.head == "same" else (HEAD,))]
    others: dict[str, Scheme | None] = {}
    if options.head != "same":
        others[HEAD] = HEAD_OF_8_BITS if options.head == "w8a16" else None
    if options.has_coded_embeddings:
        others[EMBEDDINGS] = EMBEDDINGS_OF_8_BITS
    own = {name: other for name, other in others.items() if other is not None}
    shapes = _matrix_shapes(source)
    if is_tied and f"{EMBEDDINGS}.weight" in shapes:
        shapes[f"{HEAD}.weight"] = shapes[f"{EMBEDDINGS}.weight"]
    _check_tensors(source, model, shapes)
    if is_tied:
        _check_tied_head(source)
    sized = _with_group_size(source, scheme, {name: shapes[f"{name}.weight"][1] for name in linears})
    return Plan(source, sized, others, dict.fromkeys(linears, sized) | own, is_tied and options.head != "none")


def _refuse_quantized(source: Path) -> None:
    if quantization := read_json(source / "config.json").get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ConfigError(
            f"{source} is quantised already ({method}); give the checkpoint in floats that it was made of: "
            "rounding twice loses more"
        )


def _empty_model(source: Path) -> PreTrainedModel:
    """transformers' modules, without weights."""
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    except _REFUSALS as error:
        raise ConfigError(f"{source / 'config.json'}: transformers refuses a value in it: {error}") from error
    return model


def _matrix_shapes(source: Path) -> dict[str, list[int]]:
    """The shape of each tensor that is not a vector."""
    shapes = {}
    for file in checkpoint_files(source):
        with opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                view = tensors.get_slice(name)
                if view.get_dtype() not in _FLOAT_DTYPES:
                    raise ConfigError(
                        f"{file}: tensor {name} is {view.get_dtype()}; {', '.join(_FLOAT_DTYPES)} are read"
                    )
                if len(view.get_shape()) > 1:
                    shapes[name] = view.get_shape()
    return shapes


def _check_tensors(source: Path, model: PreTrainedModel, shapes: Mapping[str, list[int]]) -> None:
    matrices = {
        f"{name}.weight": list(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding)
    }
    if unknown := sorted(shapes.keys() - matrices.keys()):
        raise ConfigError(f"{source}: {unknown[0]} is the weight of no linear layer; it cannot be quantised")
    for name, shape in matrices.items():
        if shapes.get(name) != shape:
            raise ConfigError(f"{source}: {name} is {shapes.get(name, 'missing')}; config.json asks for {shape}")


def _check_tied_head(source: Path) -> None:
    """Raises ConfigError if a stored head differs from the embeddings, because its codes would be made of these."""
    checkpoint = Checkpoint(source)
    head, embeddings = f"{HEAD}.weight", f"{EMBEDDINGS}.weight"
    if head not in checkpoint.tensors:
        return
    rows = checkpoint.tensor(embeddings)
    if not torch.equal(checkpoint.tensor(head).to(rows), rows):
        raise ConfigError(
            f"{source}: {head} differs from {embeddings} although config.json says tie_word_embeddings; "
            'write "tie_word_embeddings": false in config.json to use it'
        )


def _with_group_size(source: Path, scheme: Scheme, inputs: Mapping[str, int]) -> Scheme:
    """inputs: the number of inputs of each module to be quantised."""
    if scheme.group_size == PER_OUTPUT:
        return scheme
    fitting = [size for size in _GROUP_SIZES if all(count % size == 0 for count in inputs.values())]
    if scheme.group_size is None:
        has_groups = scheme.name == "w4a16" and fitting
        return dataclasses.replace(scheme, group_size=fitting[0] if has_groups else PER_OUTPUT)
    if misfits := [module for module, count in inputs.items() if count % scheme.group_size]:
        sizes = ", ".join(str(size) for size in [*fitting, PER_OUTPUT])
        raise ConfigError(
            f"{source}: {misfits[0]} has {inputs[misfits[0]]} inputs, which groups of {scheme.group_size} do not "
            f"divide; sizes that fit this model are: {sizes} ({PER_OUTPUT} is one scale an output)"
        )
    return scheme
