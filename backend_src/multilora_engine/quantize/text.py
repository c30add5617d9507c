"""Text for calibration and perplexity, as windows of tokens."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer

from multilora_engine.errors import ConfigError
from multilora_engine.models.registry import read_model_config

SAMPLE_TEXT = Path(__file__).with_name("sample_text.txt")
MAX_TOKENS = 32_768
"""How many tokens of a text are used. The rest is left out."""

_WINDOW_TOKENS = 512


def token_windows(checkpoint: Path, text: Path) -> list[torch.Tensor]:
    """The first MAX_TOKENS tokens of a text file in UTF-8, cut into windows, each int64 [1, 2 to 512].

    Raises ConfigError if the file cannot be read or has fewer than two tokens, or if the checkpoint has no tokenizer
    or another model's.
    """
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {text}, which has to be a text in UTF-8: {error}") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{checkpoint} has no tokenizer to read {text} with: {error}") from error
    # Without verbose=False the tokenizer would warn of a text longer than the context. The windows are shorter.
    token_ids = tokenizer(content, return_tensors="pt", verbose=False)["input_ids"][:, :MAX_TOKENS]
    windows = [window for window in token_ids.split(_WINDOW_TOKENS, dim=1) if window.shape[1] > 1]
    if not windows:
        raise ConfigError(f"{text} has {token_ids.shape[1]} tokens; give a text of some pages")
    largest, vocab_size = int(token_ids.max()), read_model_config(checkpoint).vocab_size
    if largest >= vocab_size:
        raise ConfigError(
            f"{checkpoint}: its tokenizer makes token {largest} of {text}, but vocab_size in config.json is "
            f"{vocab_size}; give the checkpoint the tokenizer that its model was trained with"
        )
    return windows


def count_tokens(windows: list[torch.Tensor]) -> int:
    return sum(window.shape[1] for window in windows)
