"""Streams in every script, cut into tokens anywhere, are what transformers decodes, through both doors.

Every second answer is free: sampled tokens of any kind. A regular expression makes the other answers a text of the
prompt's script; the model only chooses how the text falls into tokens, and cuts characters anywhere. An answer is right
if the joined pieces that `generation` streams equal the text to which transformers' tokenizer decodes the answer's
token ids; if the pieces of `ensemble` are the same text; if a demanded text is that text; and if no piece has a
replacement character that the whole text lacks.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from transformers import AutoTokenizer

from multilora_client import DIRECT, ENSEMBLE, Client
from multilora_client.options import GenerateOptions
from multilora_engine.tritonserver import ServerProcess

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
_MAX_CHARACTERS = 12
_MAX_FREE_TOKENS = 16
_MAX_TOKENS = 200
_CLIENTS = 8


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


def test_streamed_text_is_what_transformers_decodes(server: ServerProcess, default_model_dir: Path) -> None:
    asked = questions(2 * len(SAMPLES), seed=1)
    assert {question.script for question in asked} == set(SAMPLES)
    assert {question.answer is None for question in asked} == {True, False}
    tokenizer = AutoTokenizer.from_pretrained(default_model_dir)
    with (
        Client(f"grpc://{server.grpc_url}", door=DIRECT) as direct,
        Client(f"grpc://{server.grpc_url}", door=ENSEMBLE) as ensemble,
        ThreadPoolExecutor(_CLIENTS) as pool,
    ):
        faults = pool.map(lambda question: check(question, direct, ensemble, tokenizer), asked)
    assert [fault for found in faults for fault in found] == []
