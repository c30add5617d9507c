"""Write the quantised checkpoint, tensor by tensor, and read its weights back as floats."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor, ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from safetensors import SafetensorError
from safetensors.torch import save_file

from multilora_engine.errors import ConfigError
from multilora_engine.models.checkpoint import INDEX_FILE, SINGLE_FILE, checkpoint_files, opened
from multilora_engine.models.model_config import read_json
from multilora_engine.quantize.compensation import Activations, round_compensated
from multilora_engine.quantize.plan import Plan
from multilora_engine.quantize.scales import search_scales
from multilora_engine.quantize.schemes import LINEAR, PER_OUTPUT, Scheme, quantization_config

_SCALE = ".weight_scale"
_COPIED_FILES = (
    "config.json",
    "generation_config.json",
    "*token*",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.jinja",
    "LICENSE*",
    "NOTICE*",
)


def write_checkpoint(
    plan: Plan,
    directory: Path,
    calibrated: Mapping[str, Mapping[str, torch.Tensor]],
    device: torch.device,
    on_progress: Callable[[int, int], None],
) -> None:
    """Write the checkpoint in the empty directory `directory`.

    calibrated: the tensors of modules that are rounded already, as `compress` returns them. The other modules are
    rounded here, and all their inputs weigh alike. on_progress: called with (modules written, modules in all).

    Raises ConfigError for a weight that is not finite, and OSError if a file cannot be written.
    """
    _copy_small_files(plan.source, directory)
    weight_map: dict[str, str] = {}
    num_bytes = num_done = 0
    files = checkpoint_files(plan.source)
    for file in files:
        tensors: dict[str, torch.Tensor] = {}
        with opened(file) as source:
            for name in source.keys():  # noqa: SIM118 - not a mapping
                if plan.stays(name):
                    tensors[name] = source.get_tensor(name)
                for module in plan.modules_made_of(name):
                    state = calibrated.get(module)
                    if state is None:
                        weight = source.get_tensor(name)
                        _check_finite(weight, name, file)
                        state = compress(weight.to(device), plan.schemes[module])
                    tensors |= {f"{module}.{key}": value.cpu() for key, value in state.items()}
                    num_done += 1
                    on_progress(num_done, len(plan.schemes))
        _save(tensors, directory / file.name)
        weight_map |= dict.fromkeys(tensors, file.name)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if files != [plan.source / SINGLE_FILE]:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    if plan.unties_head:
        _untie_head(directory / "config.json")
    ModelCompressor(quantization_config(plan.linears, plan.others)).update_config(str(directory))


def compress(weight: torch.Tensor, scheme: Scheme, activations: Activations | None = None) -> dict[str, torch.Tensor]:
    """A linear's weight [outputs, inputs] as compressed-tensors stores it, under the names that follow the module's.

    Scales are bfloat16, or float16 for a float16 weight. A server that computes in this type rounds nothing more.

    activations: the linear's inputs on a text. The outputs on this text change least. Without activations, each weight
    gets its nearest code.
    """
    scale_dtype = torch.float16 if weight.dtype == torch.float16 else torch.bfloat16
    group_size = weight.shape[1] if scheme.group_size in (None, PER_OUTPUT) else scheme.group_size
    importance = None if activations is None else activations.mean_squares
    scales, zeros = search_scales(weight, importance, scheme.codes, group_size, scheme.is_symmetric, scale_dtype)
    rounded = weight if activations is None else round_compensated(weight, activations, scheme.codes, scales, zeros)
    state = {"weight": rounded.float(), "weight_scale": scales}
    if zeros is not None:
        state["weight_zero_point"] = zeros.to(torch.int8)
    compressor = BaseCompressor.get_value_from_registry(scheme.format.value)
    compressed: dict[str, torch.Tensor] = compressor.compress(state, scheme.for_modules())
    return compressed


def decompress(state: Mapping[str, torch.Tensor], scheme: QuantizationScheme) -> torch.Tensor:
    """The float32 weight of a module, from its tensors as compressed-tensors stores them."""
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    # compressed-tensors rounds the product of a code and its scale to the type of the scale.
    weight: torch.Tensor = compressor.decompress({**state, "weight_scale": state["weight_scale"].float()}, scheme)[
        "weight"
    ]
    return weight


def dequantized_weights(checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Each quantised module of a checkpoint that `write_checkpoint` wrote, with its float32 weight.

    compressed-tensors reads the files, and knows nothing else.
    """
    config = QuantizationConfig.model_validate(read_json(checkpoint / "config.json")["quantization_config"])
    schemes = {target: scheme for scheme in config.config_groups.values() for target in scheme.targets}
    for file in checkpoint_files(checkpoint):
        with opened(file) as tensors:
            scales = [name for name in tensors.keys() if name.endswith(_SCALE)]  # noqa: SIM118 - not a mapping
            for module in (name.removesuffix(_SCALE) for name in scales):
                scheme = schemes.get(module, schemes[LINEAR])
                compressor = BaseCompressor.get_value_from_registry(scheme.format)
                parameters = compressor.compression_param_names(scheme)
                yield module, decompress({name: tensors.get_tensor(f"{module}.{name}") for name in parameters}, scheme)


def check_output(output: Path) -> None:
    """Raises ConfigError unless `output` is missing or an empty directory."""
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise ConfigError(f"{output} is no directory; give --output another name")
    if output.is_dir() and any(output.iterdir()):
        raise ConfigError(f"{output} is not empty; give --output another name, or remove it first")


def _save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    """Raises OSError."""
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:  # safetensors also raises it for errors of the system, such as a full disk.
        raise OSError(f"cannot write {file}: {error}") from error
    # safetensors makes files that only their owner may read, but a server often runs as another user.
    file.chmod(0o644)


def _copy_small_files(source: Path, directory: Path) -> None:
    """Configuration, tokenizer, chat template and licence."""
    for pattern in _COPIED_FILES:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, directory / file.name)


def _untie_head(config: Path) -> None:
    values = read_json(config) | {"tie_word_embeddings": False}
    config.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def _check_finite(weight: torch.Tensor, name: str, file: Path) -> None:
    if not weight.isfinite().all():
        raise ConfigError(f"{file}: tensor {name} has values that are not finite; it cannot be quantised")
