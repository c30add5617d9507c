"""Tokenizers of GGUF files against transformers' conversion and llama.cpp's rules, written out here."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gguf_files import byte_tokens
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers
from transformers.integrations.gguf import convert_gguf_tokenizer

from multilora_engine.errors import ConfigError
from multilora_engine.gguf.tokenizer import TokenizerContent, json_text, read_gguf_tokenizer
from multilora_engine.text.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, _, BYTE = range(1, 7)
CORPUS = [path.read_text() for path in sorted((Path(__file__).parents[3] / "docs").glob("*.md"))[:6]]
TEXTS = st.text(st.sampled_from("abcde AB'sténI 0123456789 \n\t\r.,!? <>|ßé漢字\u0301😀\u00a0"), max_size=40)


def trained(pre: Any, size: int) -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level vocabulary."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre
    alphabet = byte_tokens(257)[:256]
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet))  # type: ignore[arg-type]
    model = json.loads(backend.to_str())["model"]
    return [*model["vocab"]], [" ".join(merge) for merge in model["merges"]]


@pytest.fixture(scope="module")
def byte_level() -> dict[str, Any]:
    tokens, merges = trained(pre_tokenizers.ByteLevel(add_prefix_space=False), 900)
    specials = ["<|begin|>", "<|im_end|>", "<think>"]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens + specials,
        "tokenizer.ggml.token_type": [NORMAL] * len(tokens) + [CONTROL, CONTROL, USER_DEFINED],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens) + 1,
        "tokenizer.chat_template": "{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}",
    }


@pytest.fixture(scope="module")
def sentencepiece() -> dict[str, Any]:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=700))
    model = json.loads(backend.to_str())["model"]
    learnt = ["".join(merge) for merge in model["merges"]]
    letters = sorted(set(model["vocab"]) - set(learnt))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *learnt]
    scores = [0.0] * 259 + [-1e6] * len(letters) + [-float(rank) for rank in range(len(learnt))]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*tokens, "  ", "<h1>"],
        "tokenizer.ggml.scores": [*scores, -1000.0, -1000.0],
        "tokenizer.ggml.token_type": [
            *(UNKNOWN, CONTROL, CONTROL),
            *[BYTE] * 256,
            *[NORMAL] * (len(letters) + len(learnt)),
            *(USER_DEFINED, USER_DEFINED),
        ],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def read(metadata: dict[str, Any]) -> TokenizerContent:
    return read_gguf_tokenizer(metadata, len(metadata["tokenizer.ggml.tokens"]))


def encode(content: TokenizerContent, text: str, adds: bool = False) -> list[int]:
    return list(Backend.from_str(content.tokenizer).encode(text, add_special_tokens=adds).ids)


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "gpt-4o"])
def test_byte_level_text_is_cut_as_transformers_cuts_it(pre: str, byte_level: dict[str, Any]) -> None:
    content = read(byte_level | {"tokenizer.ggml.pre": pre})
    names = {"ggml.model": "tokenizer_type", "ggml.pre": "pre_tokenizer_type", "ggml.token_type": "token_type"}
    kept = {key.removeprefix("tokenizer."): value for key, value in byte_level.items()} | {"ggml.pre": pre}
    theirs, _ = convert_gguf_tokenizer(
        "llama", {names.get(key, key.removeprefix("ggml.")): value for key, value in kept.items()}
    )
    ours = Backend.from_str(content.tokenizer)
    chooser = random.Random(0)
    for text in (*CORPUS, *("".join(chooser.choices("aBé I'S'll12345 \n\r.,<|im_end|>漢", k=50)) for _ in range(300))):
        assert ours.pre_tokenizer.pre_tokenize_str(text) == theirs.pre_tokenizer.pre_tokenize_str(text)
        # transformers never takes a whole word that is a token, where merges alone would not make it.
        if pre not in ("llama-bpe", "tekken"):
            expected = theirs.encode(text, add_special_tokens=False).ids
            assert ours.encode(text, add_special_tokens=False).ids == expected


def test_smollm_splits_every_digit(byte_level: dict[str, Any]) -> None:
    content = read(byte_level | {"tokenizer.ggml.pre": "smollm"})
    assert Backend.from_str(content.tokenizer).encode("in 2026 ", add_special_tokens=False).tokens[1:] == [
        "Ġ",
        *"2026",
        "Ġ",
    ]


@pytest.fixture(scope="module")
def backend(sentencepiece: dict[str, Any]) -> Backend:
    return Backend.from_str(read(sentencepiece).tokenizer)


@settings(max_examples=200)
@given(TEXTS)
def test_sentencepiece_merges_by_the_scores_as_llama_cpp_does(
    sentencepiece: dict[str, Any], backend: Backend, text: str
) -> None:
    assert backend.encode(text, add_special_tokens=False).ids == [*llama_cpp(sentencepiece, text)]


def llama_cpp(metadata: dict[str, Any], text: str) -> Iterator[int]:
    """`llm_tokenizer_spm`: user-defined tokens; then the best pair, the first of equal ones, until there is none."""
    ids = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    scores = metadata["tokenizer.ggml.scores"]
    for special in ("<h1>", "  "):
        if special in text:
            before, after = text.split(special, 1)
            yield from llama_cpp(metadata, before)
            yield ids[special]
            yield from llama_cpp(metadata, after)
            return
    if not text:
        return
    symbols = list((" " + text).replace(" ", "\u2581"))
    while True:
        pairs = [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in ids]
        if not pairs:
            break
        place = min(pairs)[1]
        symbols[place : place + 2] = ["".join(symbols[place : place + 2])]
    for symbol in symbols:
        if symbol in ids:
            yield ids[symbol]
        else:
            yield from (ids[f"<0x{byte:02X}>"] for byte in symbol.encode())


def test_text_comes_back(sentencepiece: dict[str, Any], byte_level: dict[str, Any], tmp_path: Path) -> None:
    for metadata in (sentencepiece, byte_level):
        content = read(metadata)
        (tmp_path / "tokenizer.json").write_text(content.tokenizer)
        (tmp_path / "tokenizer_config.json").write_text(json_text(content.config))
        tokenizer = Tokenizer(tmp_path)
        text = "Ein Übel: 漢字 <h2>😀"
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)).lstrip() == text
        assert tokenizer.encode("a", add_special_tokens=True)[0] == metadata["tokenizer.ggml.bos_token_id"]
        assert tokenizer.eos_id == metadata["tokenizer.ggml.eos_token_id"]
        assert tokenizer.special_ids >= {metadata["tokenizer.ggml.bos_token_id"], tokenizer.eos_id}


def test_the_file_decides_about_first_and_last_tokens_and_the_space(
    sentencepiece: dict[str, Any], byte_level: dict[str, Any]
) -> None:
    assert encode(read(byte_level), "a", adds=True)[0] == byte_level["tokenizer.ggml.bos_token_id"]
    for pre, adds in (("qwen2", False), ("tekken", True)):
        ids = encode(read(byte_level | {"tokenizer.ggml.pre": pre}), "a", adds=True)
        assert (ids[0] == byte_level["tokenizer.ggml.bos_token_id"]) == adds
    both = {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}
    assert encode(read(sentencepiece | both), "a", adds=True)[-1] == 2
    assert encode(read(sentencepiece | both), "a", adds=True)[0] != 1
    spaceless = read(sentencepiece | {"tokenizer.ggml.add_space_prefix": False})
    assert Backend.from_str(spaceless.tokenizer).encode("the", add_special_tokens=False).tokens[0][0] == "t"


def test_a_sentencepiece_vocabulary_without_named_tokens_has_those_of_llama(sentencepiece: dict[str, Any]) -> None:
    untold = {key: value for key, value in sentencepiece.items() if not key.endswith("_token_id")}
    assert read(untold) == read(sentencepiece)
    assert encode(read(untold), "a", adds=True)[0] == 1
    assert read(untold).end_token_ids == (2,)
    assert encode(read(untold | {"tokenizer.ggml.bos_token_id": 0xFFFFFFFF}), "a", adds=True)[0] != 1


def test_answers_end_at_all_tokens_at_which_llama_cpp_ends_them(byte_level: dict[str, Any]) -> None:
    begin = byte_level["tokenizer.ggml.bos_token_id"]
    content = read(byte_level | {"tokenizer.ggml.eos_token_id": begin + 2, "tokenizer.ggml.eot_token_id": begin})
    assert content.end_token_ids == (begin + 2, begin, begin + 1)
    assert content.templates == {"": byte_level["tokenizer.chat_template"]}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokenizer.ggml.model", "t5", "tokenizer.ggml.model 't5' is not supported"),
        ("tokenizer.ggml.pre", "default", "tokenizer.ggml.pre 'default' is not supported; supported are: "),
        ("tokenizer.ggml.tokens", ["a", "a"], "tokens has 'a' twice"),
        ("tokenizer.ggml.tokens", [], "is no list of texts"),
        ("tokenizer.ggml.token_type", [1], "has 1 values, and .* numbers are expected"),
        ("tokenizer.ggml.merges", ["a b c"], "is no list of pairs"),
        ("tokenizer.ggml.merges", ["a nothing"], "do not fit tokenizer.ggml.tokens"),
        ("tokenizer.ggml.eos_token_id", 1 << 20, "is none of"),
        ("tokenizer.ggml.eos_token_id", "x", "is 'x', and int is expected"),
        ("tokenizer.ggml.add_sep_token", True, "add_sep_token True is not supported"),
        ("tokenizer.ggml.nonsense", 1, "tokenizer.ggml.nonsense 1 is not supported: nobody here knows this key"),
        ("tokenizer.chat_templates", ["../x"], "no name of a template"),
        ("tokenizer.chat_templates", ["rag"], r"tokenizer\.chat_template\.rag is missing"),
    ],
)
def test_what_nobody_understands_is_refused_by_name(
    byte_level: dict[str, Any], key: str, value: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_gguf_tokenizer(byte_level | {key: value}, 4096)


def test_more_tokens_than_embeddings_are_refused(byte_level: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="tokens, and the embeddings have 9 rows"):
        read_gguf_tokenizer(byte_level, 9)
