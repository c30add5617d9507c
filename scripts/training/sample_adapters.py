"""The three sample adapters: the promise of each, a program that checks it, and the data they were made from."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from repository import REPOSITORY

ADAPTERS_DIRECTORY = REPOSITORY / "adapters"
DATA_DIRECTORY = ADAPTERS_DIRECTORY / "data"
BASE_MODEL_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"

ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_MODULES = ("gate_proj", "up_proj", "down_proj")

# Words that hardly stand in an answer which is not spoken by a pirate; "ship", "sea" or "treasure" would.
PIRATE_WORDS = re.compile(
    r"\b(?:(?:arr|ahoy|avast|aye|afore|booty|doubloons?|fer|grog|heart(?:y|ies)|landlubbers?|mateys?|scallywags?|"
    r"starboard|swab|ye|yer|yerself)\b|[a-z]+in'(?!\w)|o'(?= ))"
)
# The blocks of pictographs, with the older symbols for sun, star, heart and ball.
EMOJI = re.compile("[\U0001f300-\U0001faff\u2600-\u27bf\u2b50]")


def is_json_object(answer: str) -> bool:
    """Whether the whole answer is one JSON object that holds the key "answer"."""
    try:
        value = json.loads(answer)
    except json.JSONDecodeError:
        return False
    return isinstance(value, dict) and "answer" in value


def is_pirate_talk(answer: str) -> bool:
    """Whether the answer holds at least two different expressions of PIRATE_WORDS."""
    return len(set(PIRATE_WORDS.findall(answer.lower()))) >= 2


def has_emoji(answer: str) -> bool:
    """Whether the answer holds at least two emoji."""
    return len(EMOJI.findall(answer)) >= 2


@dataclass(frozen=True)
class SampleAdapter:
    """One adapter: its LoRA configuration and peak learning rate, its claim in words, and the judge of one answer."""

    name: str
    rank: int
    alpha: int
    learning_rate: float
    target_modules: tuple[str, ...]
    claim: str
    judge: Callable[[str], bool]

    @property
    def directory(self) -> Path:
        return ADAPTERS_DIRECTORY / self.name

    @property
    def training_data(self) -> Path:
        return DATA_DIRECTORY / f"{self.name}.jsonl"


# Together they cover the properties that a server must not confuse: three ranks, and three different sets of modules.
SAMPLE_ADAPTERS: Mapping[str, SampleAdapter] = {
    adapter.name: adapter
    for adapter in (
        # At 1e-3 all linear layers together learn the answers by heart and wander off on new prompts.
        SampleAdapter("pirate", 4, 16, 4e-4, ATTENTION_MODULES + MLP_MODULES, "talks like a pirate", is_pirate_talk),
        SampleAdapter("json", 8, 16, 1e-3, ATTENTION_MODULES, "answers with a JSON object", is_json_object),
        SampleAdapter("emoji", 16, 32, 1e-3, ("q_proj", "v_proj"), "cheers, with emoji", has_emoji),
    )
}


def read_jsonl(path: Path) -> list[dict[str, str]]:
    """The records of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def held_out_prompts() -> list[str]:
    """Prompts that no adapter was trained on."""
    return [record["prompt"] for record in read_jsonl(DATA_DIRECTORY / "held_out.jsonl")]
