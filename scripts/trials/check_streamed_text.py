"""Checks that streamed text is exact, in twenty scripts and emoji, through both doors of a real server.

Every second answer is free: tokens of any kind, drawn from a random model. A regular expression makes the other answers
a text of the prompt's script; the model only chooses how the text falls into tokens, and cuts characters anywhere. An
answer is right if the joined pieces that `generation` streams equal the text to which transformers' tokenizer decodes
the answer's token ids; if the pieces of `ensemble` are the same text; if a demanded text is that text; and if no piece
has a replacement character that the whole text lacks.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from transformers import AutoTokenizer

from marked_tables import markdown_table, write_table
from multilora_client import DIRECT, ENSEMBLE, Client
from multilora_client.options import GenerateOptions
from plots import DOCS
from servers.tiny_server import tiny_server
from sources import measured_source

SAMPLES = {
    "Latin": "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich; naïve café",
    "Cyrillic": "Съешь же ещё этих мягких французских булок, да выпей чаю",
    "Greek": "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία, ἄνθρωπος",
    "Han": "敏捷的棕色狐狸跳过了懒狗,𠮷野家在那裡",
    "Kana": "いろはにほへと ちりぬるを、カタカナも",
    "Hangul": "다람쥐 헌 쳇바퀴에 타고파",
    "Arabic": "نص حكيم له سر قاطع وذو شأن عظيم",
    "Hebrew": "דג סקרן שט בים מאוכזב ולפתע מצא חברה",
    "Devanagari": "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा",
    "Bengali": "আমি বাংলায় গান গাই, আমি বাংলার গান গাই",
    "Tamil": "யாமறிந்த மொழிகளிலே தமிழ்மொழி போல்",
    "Telugu": "ఆ నోటికి ఏదో ఒక మాట చెప్పాలి",
    "Gujarati": "ગુજરાતી ભાષા મીઠી છે",
    "Thai": "นายสังฆภัณฑ์ เฮงพิทักษ์ฝั่ง",
    "Lao": "ສະບາຍດີ ປະເທດລາວ",
    "Georgian": "ჰამლეტს წაკითხული ჰქონდა",
    "Armenian": "Բարեւ Ձեզ աշխարհ",
    "Ethiopic": "ሰላም ለዓለም ሁሉ",
    "Khmer": "ភាសាខ្មែរ មានអក្សរច្រើន",
    "Tibetan": "བོད་སྐད་ ཡིག་གཟུགས།",
    "emoji": "👩\u200d👩\u200d👧\u200d👦 🏳️\u200d🌈 👍🏽 🇪🇺 ❤️ 1️⃣ 🦜🫠",
}
PAGE = DOCS / "operating.md"
TABLE = "streamed text"
_MAX_CHARACTERS = 12
_MAX_FREE_TOKENS = 16
_MAX_TOKENS = 200
_CLIENTS = 8
_MAX_SHOWN = 10


@dataclass(frozen=True)
class Question:
    """A prompt, and the text that its answer must be; None leaves the answer free."""

    script: str
    prompt: str
    answer: str | None
    seed: int

    def options(self) -> GenerateOptions:
        options = GenerateOptions(seed=self.seed, temperature=1.0, max_tokens=_MAX_FREE_TOKENS)
        if self.answer is None:
            return options
        guide = GenerateOptions(guide_type="regex", guide=re.escape(self.answer), max_tokens=_MAX_TOKENS)
        return options | guide


def questions(count: int, seed: int) -> list[Question]:
    """Questions whose scripts take turns."""
    random, scripts = Random(seed), list(SAMPLES)
    made = []
    for number in range(count):
        script = scripts[number % len(scripts)]
        answer = None if number // len(scripts) % 2 else _part(random, SAMPLES[script])
        made.append(Question(script, _part(random, SAMPLES[script]), answer, random.getrandbits(32)))
    return made


def _part(random: Random, text: str) -> str:
    start = random.randrange(len(text))
    return (text[start:] + " " + text[:start])[: random.randint(1, _MAX_CHARACTERS)]


def check(question: Question, direct: Client, ensemble: Client, tokenizer: Any) -> list[str]:
    """The faults of the answers to a question; empty if there are none."""
    chunks = list(direct.stream(question.prompt, **question.options()))
    pieces = [chunk.text for chunk in chunks]
    text, token_ids = "".join(pieces), [token_id for chunk in chunks for token_id in chunk.token_ids]
    expected = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    answers = {
        "the stream of generation": text,
        "the stream of ensemble": "".join(c.text for c in ensemble.stream(question.prompt, **question.options())),
    }
    wrong = [f"{name} is {answer!r}, not {expected!r}" for name, answer in answers.items() if answer != expected]
    if question.answer not in (None, text):
        wrong.append(f"the answer is {text!r}, asked for was {question.answer!r}")
    if sum(piece.count("\ufffd") for piece in pieces) != expected.count("\ufffd"):
        wrong.append(f"pieces have cut characters: {pieces}")
    return wrong


def check_all(grpc_url: str, model: Path, asked: list[Question], on_done: Callable[[], None]) -> list[str]:
    """The faults of the answers of a running server."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    with (
        Client(f"grpc://{grpc_url}", door=DIRECT) as direct,
        Client(f"grpc://{grpc_url}", door=ENSEMBLE) as ensemble,
        ThreadPoolExecutor(_CLIENTS) as pool,
    ):

        def check_one(question: Question) -> list[str]:
            wrong = [f"{question}: {reason}" for reason in check(question, direct, ensemble, tokenizer)]
            on_done()
            return wrong

        return [reason for wrong in pool.map(check_one, asked) for reason in wrong]


def outcome_table(asked: list[Question], wrong: list[str]) -> str:
    """The counts as a document has them."""
    rows = {
        "prompts": len(asked),
        "scripts, and emoji": len({question.script for question in asked}),
        "answers that are a demanded text": sum(question.answer is not None for question in asked),
        "streams, at two doors": 2 * len(asked),
        "faults": len(wrong),
    }
    return markdown_table(("", "count"), [(name, f"{count:,}") for name, count in rows.items()])


def main(
    prompts: Annotated[int, typer.Option(min=1, help="Prompts; the scripts take turns.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of prompts and answers.")] = 0,
    update_docs: Annotated[bool, typer.Option("--docs", help="Write the table of docs/operating.md.")] = False,
) -> None:
    """Stream answers in twenty scripts and emoji, and check every character. Ends with status 1 if one is wrong."""
    source = measured_source() if update_docs else ""
    console, started = Console(), time.perf_counter()
    asked = questions(prompts, seed)
    with Progress(console=console, transient=True) as progress, tiny_server() as (server, model):
        task = progress.add_task("asking", total=prompts)
        wrong = check_all(server.grpc_url, model, asked, lambda: progress.advance(task))
    for reason in wrong[:_MAX_SHOWN]:
        console.print(f"[red]{escape(reason)}")
    if update_docs:
        write_table(PAGE, TABLE, outcome_table(asked, wrong), source)
    scripts = Counter(question.script for question in asked)
    console.print(
        f"{prompts} prompts in {len(scripts) - 1} scripts and emoji, streamed by generation and by ensemble: "
        f"{len(wrong)} answers differ from tokenizer.decode; {time.perf_counter() - started:.0f} s"
    )
    raise typer.Exit(1 if wrong else 0)
