"""The sample adapters: the promise of each, a program that checks it, and the data that each was made from."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from multilora_engine.quickstart.samples import JUDGE_INVOCATION, sample_directory
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
    """One adapter: its LoRA configuration, its peak learning rate and its claim in words.

    epochs, batch_size: How often it sees its examples, and how many in a step.
    invocation: The text of the user turn from which on an activated adapter counts; empty for other adapters.
    trained_token: The token in `invocation` whose row of the embeddings is trained, too; empty for none.
    """

    name: str
    rank: int
    alpha: int
    learning_rate: float
    target_modules: tuple[str, ...]
    claim: str
    epochs: int = field(default=9, kw_only=True)
    batch_size: int = field(default=8, kw_only=True)
    invocation: str = field(default="", kw_only=True)
    trained_token: str = field(default="", kw_only=True)

    @property
    def directory(self) -> Path:
        return sample_directory(self.name)

    @property
    def training_data(self) -> Path:
        return DATA_DIRECTORY / f"{self.name}.jsonl"


@dataclass(frozen=True)
class StyleAdapter(SampleAdapter):
    """An adapter that answers in a style, and a program that tells whether one answer has the style."""

    judge: Callable[[str], bool]


# Together they cover the properties that a server must not confuse: three ranks, and three different sets of modules.
STYLE_ADAPTERS: Mapping[str, StyleAdapter] = {
    adapter.name: adapter
    for adapter in (
        # At 1e-3 all linear layers together learn the answers by heart and wander off on new prompts.
        StyleAdapter("pirate", 4, 16, 4e-4, ATTENTION_MODULES + MLP_MODULES, "talks like a pirate", is_pirate_talk),
        StyleAdapter("json", 8, 16, 1e-3, ATTENTION_MODULES, "answers with a JSON object", is_json_object),
        StyleAdapter("emoji", 16, 32, 1e-3, ("q_proj", "v_proj"), "cheers, with emoji", has_emoji),
    )
}
PLAIN = "plain"
JUDGE = SampleAdapter(
    "judge",
    4,
    16,
    1e-3,
    ("q_proj", "v_proj", "o_proj"),
    "names an answer's style",
    epochs=1,
    batch_size=4,
    invocation=JUDGE_INVOCATION,
    trained_token="Style",
)
SAMPLE_ADAPTERS: Mapping[str, SampleAdapter] = {**STYLE_ADAPTERS, JUDGE.name: JUDGE}


def style_of(answer: str) -> str:
    """The name of the style adapter whose style the answer has, or PLAIN: what the judge should say."""
    return next((name for name, adapter in STYLE_ADAPTERS.items() if adapter.judge(answer)), PLAIN)


def judge_training_records() -> list[dict[str, str]]:
    """Every second question with a plain answer and with an answer in each style, as {prompt, answer}."""
    styled = (record for adapter in STYLE_ADAPTERS.values() for record in read_jsonl(adapter.training_data)[::2])
    return [*read_jsonl(JUDGE.training_data), *styled]


def read_jsonl(path: Path) -> list[dict[str, str]]:
    """The records of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def held_out_prompts() -> list[str]:
    """Prompts that no adapter was trained on."""
    return [record["prompt"] for record in read_jsonl(DATA_DIRECTORY / "held_out.jsonl")]
