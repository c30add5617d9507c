"""Guided answers against the readers of other libraries: json, jsonschema, re."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.engines import assert_idle, run_all
from support.fronts import TIMEOUT_S
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as TokenizerBackend
from transformers import PreTrainedTokenizerFast

from checkpoints.tiny_llama import save_tiny_llama
from multilora_engine.config import EngineConfig
from multilora_engine.engine import accounts
from multilora_engine.engine import engine as engine_module
from multilora_engine.engine.engine import Engine
from multilora_engine.engine.guide_queue import GuidesInUse
from multilora_engine.errors import GuidesFull, InvalidRequest
from multilora_engine.guides import guided
from multilora_engine.guides.guide_grammar import MAX_GUIDE_BYTES
from multilora_engine.guides.guide_sandbox import GuideSandbox
from multilora_engine.guides.guided import GuideCompiler, GuideMatcher
from multilora_engine.request import GenerationRequest, Guide, SamplingParams
from multilora_engine.text.tokenizer import Tokenizer

END = 2
"""<|im_end|> of the tokenizer."""

DIGITS = Guide("regex", "[0-9]{4}")
NUMBER = Guide("regex", "[0-9]+")


@pytest.fixture(scope="module")
def tokenizer(default_model_dir: Path) -> Tokenizer:
    return Tokenizer(default_model_dir)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GuideCompiler]:
    compiler = GuideCompiler(tokenizer, tokenizer.vocab_size)
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"), vocab_size=tokenizer.vocab_size)


def make_engine(checkpoint: Path, default_model_dir: Path, **options: Any) -> Engine:
    """By default with no more blocks than needed: every one is looked at after every step."""
    options = {"kv_cache_memory_bytes": 8 << 20} | options
    return Engine(EngineConfig(model_path=checkpoint, tokenizer_path=default_model_dir, num_threads=1, **options))


@pytest.fixture(scope="module")
def engine(checkpoint: Path, default_model_dir: Path) -> Engine:
    return make_engine(checkpoint, default_model_dir)


def request(name: str, guide: Guide | None, **sampling: Any) -> GenerationRequest:
    options = {"max_tokens": 400, "top_k": 0, "end_id": END, "seed": len(name), **sampling}
    return GenerationRequest(name, [50, 60, 70], SamplingParams(guide=guide, **options))


def random_schema(rng: Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose values are short."""
    leaves = [
        {"type": "integer", "minimum": rng.randint(-50, 0), "maximum": rng.randint(1, 5000)},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["red", "grün", 7, None, '"']},
        {"type": "string", "maxLength": rng.randint(0, 6)},
        {"type": "string", "pattern": "^[a-f]{2,4}-(x|yz)$"},
    ]
    if depth == 2 or rng.random() < 0.3:
        return rng.choice(leaves)
    if rng.random() < 0.3:
        return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": 1, "maxItems": 3}
    if rng.random() < 0.2:
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}
    properties = {f"key {i}": random_schema(rng, depth + 1) for i in range(rng.randint(1, 3))}
    required = [key for key in properties if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def allowed_ids(words: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def test_any_walk_through_the_allowed_tokens_of_a_schema_ends_in_what_it_describes(
    compiler: GuideCompiler, tokenizer: Tokenizer
) -> None:
    rng = Random(3)
    for _ in range(60):
        schema = random_schema(rng)
        matcher = compiler.matcher(Guide("json_schema", json.dumps(schema)), (END,))
        token_ids: list[int] = []
        is_complete = False
        while not is_complete:
            token_ids.append(rng.choice(allowed_ids(matcher.allowed)))
            is_complete = matcher.advance(token_ids[-1])
        jsonschema.validate(json.loads(tokenizer.decode(token_ids)), schema)


def test_a_sentencepiece_tokenizer_and_a_padded_vocabulary_are_guided_too(tmp_path: Path) -> None:
    tokenizer = Tokenizer(sentencepiece_tokenizer(tmp_path))
    compiler = GuideCompiler(tokenizer, vocab_size=tokenizer.vocab_size + 70)
    rng, expression = Random(1), "[a-z ]{3}llo wörld🌟{2}x{2,4}"
    for _ in range(20):
        matcher = compiler.matcher(Guide("regex", expression), (1,))
        token_ids: list[int] = []
        is_complete = False
        while not is_complete:
            token_ids.append(rng.choice(allowed_ids(matcher.allowed)))
            is_complete = matcher.advance(token_ids[-1])
        assert re.fullmatch(expression, tokenizer.decode(token_ids))


def sentencepiece_tokenizer(path: Path) -> Path:
    """A unigram model with a space mark put in front of every text, and bytes as fallback."""
    pieces = ["<unk>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "llo", "▁w", "ld", "<0x"]
    backend = TokenizerBackend(models.Unigram([(p, -float(i)) for i, p in enumerate(pieces)], 0, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(path)
    return path


_REPEATS = st.sampled_from(["", "*", "+", "?", "{3}", "{1,40}", "{0,900}"])
_CLASSES = st.sampled_from(["a", ".", "[a-m]", r"\\w", r"\\p{L}", "(a|b)", "(a+)+", "(.*a)"])
_EXPRESSIONS = st.lists(st.tuples(_CLASSES, _REPEATS).map("".join), min_size=1, max_size=6).map("".join)


@st.composite
def grammars(draw: st.DrawFn, defines: str, start: str) -> str:
    """Up to 4,000 rules, each of up to three ones near it, in chains and in circles."""
    number, reach = draw(st.sampled_from([1, 3, 10, 100, 1000, 4000])), draw(st.sampled_from([0, 0, 2, 4000]))
    joins, rng = draw(st.sampled_from([" ", " | ", ' "b" '])), draw(st.randoms(use_true_random=False))
    rules = [f"{start}{defines} a0", f'a{number}{defines} "x"']
    for i in range(number):
        others = [min(number, max(0, i + 1 - rng.randint(0, reach))) for _ in range(rng.randint(1, 3 if reach else 1))]
        rules.append(f"a{i}{defines} {joins.join(f'a{other}' for other in others)}")
    return "\n".join(rules)[:MAX_GUIDE_BYTES]


_INTERSECTIONS = st.lists(_EXPRESSIONS, min_size=1, max_size=20).map(
    lambda terms: "start: T\nT: " + " & ".join(f"/{each}/" for each in terms)
)


@st.composite
def schemas(draw: st.DrawFn) -> str:
    """Schemas that refer to each other, in chains or at random, at any depth, in all keywords that take schemas."""
    number, depth = draw(st.sampled_from([(1, 1), (1, 3), (3, 1000), (1, 4000), (20, 2), (300, 2), (1500, 1)]))
    is_chain, rng = draw(st.booleans()), draw(st.randoms(use_true_random=False))
    text = json.dumps({"type": "string", "pattern": draw(_EXPRESSIONS)})
    wraps = draw(
        st.lists(
            st.sampled_from(
                [
                    ('{"items":', "}"),
                    ('{"properties":{"a":', "}}"),
                    ('{"additionalProperties":', "}"),
                    ('{"allOf":[', "]}"),
                    (f'{{"allOf":[{text},', "]}"),
                    (f'{{"anyOf":[{text},', "]}"),
                    (f'{{"oneOf":[{text},', "]}"),
                    ('{"prefixItems":[', "]}"),
                    ('{"not":', "}"),
                ]
            ),
            min_size=1,
            max_size=3,
        )
    )
    links = [f'"{number}":{text}']
    for i in range(number):
        around = [rng.choice(wraps) for _ in range(depth)]
        other = i + 1 if is_chain else rng.randint(0, number)
        before, after = ("".join(part) for part in zip(*around, strict=True))
        links.append(f'"{i}":{before}{{"$ref":"#/$defs/{other}"}}{after}')
    return '{"$ref":"#/$defs/0","$defs":{' + ",".join(links) + "}}"


_GUIDES = st.one_of(
    st.builds(Guide, st.just("ebnf_grammar"), grammars(":", "start")),
    st.builds(Guide, st.just("ebnf_grammar"), grammars(" ::=", "root")),
    st.builds(Guide, st.just("ebnf_grammar"), _INTERSECTIONS),
    st.builds(Guide, st.just("json_schema"), schemas()),
    st.builds(Guide, st.just("regex"), _EXPRESSIONS),
).filter(lambda guide: guide.num_bytes <= MAX_GUIDE_BYTES)


@given(_GUIDES)
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_a_guide_of_any_form_is_refused_or_guides_and_the_next_one_is_compiled(
    compiler: GuideCompiler, guide: Guide
) -> None:
    refusal = ""
    try:
        matcher = compiler.matcher(guide, (END,))
        rng = Random(guide.num_bytes)
        for _ in range(30):
            if matcher.advance(rng.choice(allowed_ids(matcher.allowed))):
                break
    except InvalidRequest as error:
        refusal = str(error)
    assert len(refusal) < 1000
    compiler.matcher(DIGITS, (END,))


def test_what_a_guide_keeps_is_what_the_memory_grows_by(default_model_dir: Path) -> None:
    """In a process of its own, where nothing else takes or frees memory."""
    program = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from multilora_engine.request import Guide\n"
        "from multilora_engine.guides.guided import GuideCompiler\n"
        "from multilora_engine.text.tokenizer import Tokenizer\n"
        "def pages():\n"
        "    return int(open('/proc/self/statm').read().split()[1])\n"
        "tokenizer = Tokenizer(Path(sys.argv[1]))\n"
        "compiler = GuideCompiler(tokenizer, tokenizer.vocab_size)\n"
        "def compiled(row):\n"
        "    schema = {'properties': {f'{row} {i}': {'type': 'integer', 'minimum': i} for i in range(400)}}\n"
        "    return compiler.matcher(Guide('json_schema', json.dumps(schema)), ())\n"
        "first, before = compiled(0), pages()\n"
        "matchers = [compiled(row) for row in range(1, 7)]\n"
        "print((pages() - before) * 4096 / sum(each.compiled.kept_bytes for each in matchers))\n"
        "compiler.close()\n"
    )
    command = [sys.executable, "-c", program, str(default_model_dir)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert 0.5 < float(done.stdout) < 1.5


def test_of_text_that_a_guide_forces_no_more_is_tokenized_for_a_token_than_it_needs(
    compiler: GuideCompiler, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        lengths.append(len(text))
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    text = "It was a bright cold day in April. " * 100
    matcher = compiler.matcher(Guide("regex", text.replace(".", "[.]")), (END,))
    token_ids: list[int] = []
    is_complete = False
    while not is_complete:
        token_ids.append(allowed_ids(matcher.allowed)[-1])
        is_complete = matcher.advance(token_ids[-1])
    assert tokenizer.decode(token_ids) == text
    assert max(lengths) < 1000


def test_compiling_takes_only_time_that_no_step_wants(compiler: GuideCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    classes: list[int] = []
    make_matcher = guided.make_matcher

    def noted(*arguments: Any) -> Any:
        classes.append(os.sched_getscheduler(0))
        return make_matcher(*arguments)

    monkeypatch.setattr(guided, "make_matcher", noted)
    compiler.matcher(Guide("regex", "seldom asked for"), (END,))
    assert classes == [os.SCHED_IDLE]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    assert compiler._sandbox._process is not None
    assert os.sched_getscheduler(compiler._sandbox._process.pid) == os.SCHED_IDLE


def test_a_lexer_that_has_grown_with_many_answers_is_made_anew(
    compiler: GuideCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guided, "_MAX_TOKENS_OF_A_LEXER", 5)
    first = compiler.matcher(NUMBER, (END,))
    again = compiler.matcher(NUMBER, (END,))
    assert again.compiled is first.compiled
    for _ in range(5):
        again.advance(allowed_ids(again.allowed)[-1])
    later = compiler.matcher(NUMBER, (END,))
    assert later.compiled is not first.compiled
    assert (later.allowed == first.allowed).all()


def test_a_guide_that_was_refused_a_moment_ago_is_not_tried_again(
    compiler: GuideCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = Guide("regex", "(unclosed")
    with pytest.raises(InvalidRequest, match="unclosed group") as first:
        compiler.matcher(guide, (END,))
    tried: list[Guide] = []
    monkeypatch.setattr(GuideSandbox, "try_guide", lambda self, guide, watch: tried.append(guide))
    with pytest.raises(InvalidRequest) as second:
        compiler.matcher(guide, (END,))
    assert str(second.value) == str(first.value)
    assert not tried


def test_answers_of_random_schemas_validate(engine: Engine) -> None:
    rng = Random(5)
    schemas = {f"{i}": random_schema(rng) for i in range(24)}
    requests = [request(name, Guide("json_schema", json.dumps(schema))) for name, schema in schemas.items()]
    answers = run_all(engine, requests)
    for name, schema in schemas.items():
        final = answers[name].final
        assert final is not None
        assert final.error_code is None
        if final.finish_reason == "stop":
            jsonschema.validate(json.loads(answers[name].text), schema)
    assert sum(answer.final is not None and answer.final.finish_reason == "stop" for answer in answers.values()) > 18


@pytest.mark.parametrize("expression", [r"[0-9]{3}-[a-c]{1,5}x", r"(ja|nein|vielleicht)", r"\p{Lu}\w{2}[.!?]", "é{3}"])
@pytest.mark.parametrize("end_id", [END, -1])
def test_answers_of_an_expression_match_it(engine: Engine, expression: str, end_id: int) -> None:
    answers = run_all(engine, [request("r" * i, Guide("regex", expression), end_id=end_id) for i in range(1, 6)])
    for answer in answers.values():
        assert answer.final is not None
        assert answer.final.finish_reason == "stop"
        assert re.fullmatch(expression.replace(r"\p{Lu}", r"[^\W\d_a-z]"), answer.text)


@pytest.mark.parametrize("grammar", ['root ::= "a" b "."\nb ::= [xy]+', 'start: "a" b "."\nb: /[xy]+/'])
def test_a_grammar_is_gbnf_or_lark(engine: Engine, grammar: str) -> None:
    answer = run_all(engine, [request("r", Guide("ebnf_grammar", grammar))])["r"]
    assert re.fullmatch("a[xy]+[.]", answer.text)


def test_json_is_an_object_or_an_array(compiler: GuideCompiler, tokenizer: Tokenizer) -> None:
    first = {tokenizer.decode([i]).strip()[:1] for i in allowed_ids(compiler.matcher(Guide("json"), ()).allowed)}
    assert first <= {"", "{", "["}
    assert {"{", "["} <= first


def test_an_end_token_may_come_only_where_the_answer_parses(compiler: GuideCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.matcher(NUMBER, (END,))
    assert END not in allowed_ids(matcher.allowed)
    assert not matcher.advance(tokenizer.encode("7", add_special_tokens=False)[0])
    assert END in allowed_ids(matcher.allowed)
    assert matcher.advance(END)


def test_without_an_end_token_a_grammar_that_may_go_on_goes_on(engine: Engine) -> None:
    answer = run_all(engine, [request("r", NUMBER, end_id=-1, max_tokens=30)])["r"]
    assert answer.final is not None
    assert (answer.final.finish_reason, len(answer.token_ids)) == ("length", 30)
    assert re.fullmatch("[0-9]+", answer.text)


def test_max_tokens_cuts_an_answer_short(engine: Engine) -> None:
    answer = run_all(engine, [request("r", DIGITS, max_tokens=2)])["r"]
    assert answer.final is not None
    assert answer.final.finish_reason == "length"
    assert re.fullmatch("[0-9]{2}", answer.text)


def test_min_tokens_delays_the_end_token_but_does_not_hold_a_complete_answer_open(engine: Engine) -> None:
    answers = run_all(engine, [request("long", NUMBER, min_tokens=25), request("short", DIGITS, min_tokens=25)])
    assert len(answers["long"].token_ids) >= 25
    assert re.fullmatch("[0-9]+", answers["long"].text)
    assert re.fullmatch("[0-9]{4}", answers["short"].text)


def test_a_guide_holds_for_the_text_after_a_forced_token(engine: Engine) -> None:
    (letter,) = engine._tokenizer.encode("a", add_special_tokens=False)
    answers = run_all(
        engine,
        [
            request("r", DIGITS, forced_first_id=letter, bad_token_sequences=((letter,),)),
            request("last", DIGITS, forced_first_id=letter, max_tokens=1, return_log_probs=True),
        ],
    )
    assert re.fullmatch("a[0-9]{4}", answers["r"].text)
    assert (answers["last"].text, len(answers["last"].log_probs)) == ("a", 1)
    assert answers["last"].log_probs[0].log_prob < -1, "the model's own log-prob"


def test_a_stop_word_ends_a_guided_answer(engine: Engine) -> None:
    answer = run_all(engine, [request("r", Guide("regex", "[ab]{300}"), stop_words=("ba",))])["r"]
    assert answer.final is not None
    assert answer.final.finish_reason == "stop"
    assert re.fullmatch("a*b*", answer.text)


def test_neighbours_of_a_guided_answer_are_unchanged(engine: Engine) -> None:
    def free(i: int) -> GenerationRequest:
        return request("x" * i, None, max_tokens=20, seed=i)

    alone = {name: a.token_ids for name, a in run_all(engine, [free(1), free(2)]).items()}
    mixed = run_all(
        engine, [free(1), request("guided", DIGITS), free(2), request("json", Guide("json"), max_tokens=20)]
    )
    assert {name: mixed[name].token_ids for name in alone} == alone


def test_a_preempted_answer_goes_on_where_it_was(
    checkpoint: Path, default_model_dir: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, matcher = threading.Semaphore(0), GuideCompiler.matcher

    def counted(*arguments: Any) -> GuideMatcher:
        try:
            return matcher(*arguments)
        finally:
            compiled.release()

    monkeypatch.setattr(GuideCompiler, "matcher", counted)
    requests = [request(f"r{i}", Guide("regex", "[0-9]{100}x"), seed=i) for i in range(6)]

    def all_at_once() -> Iterator[GenerationRequest]:
        """However busy the machine is: their guides are ready before the first step."""
        yield from requests
        for _ in requests:
            assert compiled.acquire(timeout=TIMEOUT_S)

    small = make_engine(checkpoint, default_model_dir, max_model_len=128, kv_cache_memory_bytes=45_000)
    answers = run_all(small, all_at_once())
    assert small.stats.num_preemptions > 0
    assert all(re.fullmatch("[0-9]{100}x", answer.text) for answer in answers.values())
    assert {name: a.text for name, a in run_all(engine, requests).items()} == {n: a.text for n, a in answers.items()}


LARK_CHAIN = "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(3000)) + '\na3000: "x"'
_LINKS = {f"{i}": {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(1500)}
SCHEMA_CHAIN = json.dumps({"$ref": "#/$defs/0", "$defs": {**_LINKS, "1500": {}}})


@pytest.mark.parametrize(
    ("guide", "message"),
    [
        (Guide("json_schema", "{"), "json_schema guide is malformed: .*line 1 column"),
        (Guide("json_schema", '{"type": "objec"}'), "Invalid type: objec"),
        (Guide("json_schema", "false"), "object schema"),
        (Guide("json_schema", '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (Guide("json_schema", '{"$ref": "http://example.org/x"}'), "does not fetch"),
        (Guide("json_schema", '{"$ref": "#"}'), "no answer from here"),
        (Guide("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000), "recursion"),
        # llguidance ends the process over these two, and rounds the bounds of the third.
        (Guide("json_schema", f'{{"enum": [{-(2**63)}]}}'), "-9223372036854775808 is beyond 2"),
        (Guide("json_schema", '{"type": "integer", "minimum": -1e30, "maximum": -1e29}'), r"-1e30 is beyond 2\^53"),
        (Guide("json_schema", f'{{"type": "integer", "minimum": {2**53 + 1}}}'), "9007199254740993 is beyond"),
        (Guide("ebnf_grammar", f'start: "x" %json {{"const": {-(2**63)}}}'), "9223372036854775808 is beyond"),
        (Guide("regex", "(a"), "unclosed group"),
        (Guide("regex", ""), "nothing but an empty answer"),
        (Guide("regex", "(" * 20_000 + "a" + ")" * 20_000), "regex guide is malformed"),
        (Guide("ebnf_grammar", 'root ::= "a'), "Unexpected end of input"),
        (Guide("ebnf_grammar", "root ::= " + "(" * 20_000), "recursion"),
        (Guide("ebnf_grammar", "start: " + "(" * 20_000), "too deeply nested"),
        (Guide("ebnf_grammar", 'start: start "a"'), "no answer from here"),
        (Guide("ebnf_grammar", LARK_CHAIN), "takes more than 8388608 bytes of stack to compile"),
        (Guide("json_schema", SCHEMA_CHAIN), "takes more than 8388608 bytes of stack to compile"),
    ],
    ids=lambda value: None if isinstance(value, Guide) else value[:20],
)
def test_a_guide_that_cannot_work_fails_its_request_only(engine: Engine, guide: Guide, message: str) -> None:
    answers = run_all(engine, [request("r", guide), request("free", None, max_tokens=3)])
    assert answers["r"].final is not None
    assert answers["r"].final.error_code == "INVALID_ARG"
    assert re.search(message, answers["r"].final.error_message or "")
    assert len(answers["free"].token_ids) == 3


def test_a_guide_too_long_is_refused_on_arrival(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="65538 bytes, at most 65536"):
        engine.add_request(request("r", Guide("regex", "é" * 32_769)))
    assert_idle(engine)


def test_a_request_whose_tokens_keep_the_thread_too_long_ends_and_no_other(
    checkpoint: Path, default_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts, "HOST_WORK_S", 1e-7)
    engine = make_engine(checkpoint, default_model_dir)
    answers = run_all(engine, [request("guided", NUMBER, end_id=-1), request("free", None, max_tokens=3)])
    assert answers["guided"].final is not None
    assert answers["guided"].final.error_code == "INVALID_ARG"
    assert "ms more of the engine's thread than its share" in (answers["guided"].final.error_message or "")
    assert len(answers["free"].token_ids) == 3


def test_guides_in_flight_are_bounded_together(
    checkpoint: Path, default_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 2 * len(DIGITS.text + NUMBER.text)
    monkeypatch.setattr(engine_module, "GuidesInUse", partial(GuidesInUse, max_bytes=most))
    engine = make_engine(checkpoint, default_model_dir)
    for name, guide in (("a", DIGITS), ("b", NUMBER), ("c", NUMBER)):
        engine.add_request(request(name, guide))
    with pytest.raises(
        GuidesFull, match=r"the guide takes 4 bytes of memory, other guides in flight 14, and .* 28, half"
    ):
        engine.add_request(request("d", Guide("regex", "[ab]")))
    assert engine.abort("a") is not None
    engine.add_request(request("d", Guide("regex", "[ab]")))
    engine.check_integrity()


def test_a_compiled_guide_counts_by_its_memory(
    checkpoint: Path, default_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "GuidesInUse", partial(GuidesInUse, max_bytes=100_000))
    engine = make_engine(checkpoint, default_model_dir)
    answers = run_all(engine, [request("large", DIGITS), request("free", None, max_tokens=3)])
    assert answers["large"].final is not None
    assert answers["large"].final.error_code == "UNAVAILABLE"
    assert "may take 100000" in (answers["large"].final.error_message or "")
    assert len(answers["free"].token_ids) == 3
    assert_idle(engine)


def test_a_guide_no_token_of_the_model_can_follow_is_refused(tokenizer: Tokenizer) -> None:
    compiler = GuideCompiler(tokenizer, vocab_size=311)
    with pytest.raises(InvalidRequest, match="no token of this model"):
        compiler.matcher(Guide("regex", "hello"), (END,))


def test_bad_words_that_leave_a_guide_no_token_end_its_request_only(engine: Engine, tokenizer: Tokenizer) -> None:
    digits = [(i,) for i in range(tokenizer.vocab_size) if re.search("[0-9]", tokenizer.decode([i]))]
    impossible = request("r", DIGITS, bad_token_sequences=tuple(digits))
    answers = run_all(engine, [impossible, request("free", None, max_tokens=3)])
    assert answers["r"].final is not None
    assert answers["r"].final.error_code == "INVALID_ARG"
    assert len(answers["free"].token_ids) == 3
