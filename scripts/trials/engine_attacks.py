"""Attacks on the engine by requests that any client may send: rows for a table of abuse.

Each is bounded in number and time. Some ask for more than a server's limits allow, some for exactly as much.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from multilora_wire.adapter_use import join_use_files
from trials.door_attacks import VICTIM_REQUEST_ID
from trials.doors import GRPC_OPTIONS, STREAMING_MODEL, TIMEOUT_S, Attack, Doors, answers, ask, infer_request, told

_ATTENTION_OUT = 4
"""The module of the attention's output, on the wire."""

_ATTACK_S = 5.0
_MAX_WORDS = 4096
_MAX_BIASES = 65_536
_MAX_LOGITS = 341
"""The tokens whose logits of 49,152 words are 67 MB, of 64 MiB."""
_MAX_STREAMED_LOGITS = 85
"""The same of 16 MiB."""


def stream_of_attacks(doors: Doors, make: Callable[[int], service_pb2.ModelInferRequest], at_once: int = 8) -> str:
    """Let several clients send one request after the other, for as long as an attack lasts."""
    lock, numbers, end = threading.Lock(), iter(range(1 << 30)), time.monotonic() + _ATTACK_S
    seen: list[str] = []
    with grpc.insecure_channel(doors.grpc_url, GRPC_OPTIONS) as channel, ThreadPoolExecutor(at_once) as pool:
        stub = GRPCInferenceServiceStub(channel)

        def attack(_: int) -> None:
            while time.monotonic() < end:
                with lock:
                    number = next(numbers)
                seen.append(ask(stub, doors, make(number)))

        list(pool.map(attack, range(at_once)))
    return told(seen)


def send_words_times_beams(doors: Doors) -> str:
    """Send 8 rows x beam 8 x 65,536 words in one request, which once killed the engine."""
    return answers(doors, [_prompt(rows=8, beam_width=8, stop_words=_letters(65_536))])


def send_words_times_sequences(doors: Doors) -> str:
    return answers(doors, [_prompt(num_return_sequences=64, stop_words=_letters(65_536))])


def send_word_lists(doors: Doors) -> str:
    """Send 300,000 ids of stop words, and a million of bad words."""
    return answers(doors, [_prompt(stop_words_list=_word_list(300_000)), _prompt(bad_words_list=_word_list(1_000_000))])


def send_as_many_words_as_allowed(doors: Doors) -> str:
    return stream_of_attacks(
        doors, lambda number: _prompt(max_tokens=32, stop_words=_words(number, 2048), bad_words=_words(number, 2047))
    )


def send_as_many_words_as_allowed_to_beams(doors: Doors) -> str:
    return stream_of_attacks(
        doors, lambda number: _prompt(max_tokens=32, beam_width=8, stop_words=_words(number, _MAX_WORDS))
    )


def send_one_long_repetitive_word(doors: Doors) -> str:
    return stream_of_attacks(doors, lambda _: _prompt(max_tokens=32, stop_words=["a" * 65_000 + "b"]))


def send_many_schemas(doors: Doors) -> str:
    """Send 64 rows in one request, each with a schema of its own."""
    return answers(doors, [_guided([("json_schema", _schema(row)) for row in range(64)])])


def send_as_many_schemas_as_allowed(doors: Doors) -> str:
    return stream_of_attacks(
        doors, lambda n: _guided([("json_schema", _schema(16 * n + row)) for row in range(16)]), at_once=4
    )


def send_hostile_guides(doors: Doors) -> str:
    """Send 100 guides that overflow a stack, never end, fill the memory or have costly masks, each another one."""
    return answers(doors, [_guided([hostile_guide(number)]) for number in range(100)], at_once=8)


def send_many_sequences(doors: Doors) -> str:
    return answers(doors, [_prompt(num_return_sequences=128, max_tokens=4) for _ in range(4)], at_once=4)


def send_rows_times_sequences(doors: Doors) -> str:
    return answers(doors, [_prompt(rows=64, num_return_sequences=128)])


def send_as_many_biases_as_allowed(doors: Doors) -> str:
    ids, weights = list(range(_MAX_BIASES // 2)), [0.5] * (_MAX_BIASES // 2)
    return stream_of_attacks(doors, lambda _: _prompt(embedding_bias_ids=ids, embedding_bias_weights=weights))


def ask_for_logits(doors: Doors) -> str:
    """Ask for the logits of 1,300 tokens: 255 MB an answer."""
    return answers(doors, [_with_logits("generation_unary", 1300)] * 4, at_once=4)


def ask_for_as_many_logits_as_allowed(doors: Doors) -> str:
    return stream_of_attacks(doors, lambda _: _with_logits("generation_unary", _MAX_LOGITS), at_once=4)


def ask_the_victims_model_for_as_many_logits_as_allowed(doors: Doors) -> str:
    """Ask for the logits of 85 tokens, the most that a streaming request may: one thread copies all answers."""
    return stream_of_attacks(doors, lambda _: _with_logits(STREAMING_MODEL, _MAX_STREAMED_LOGITS), at_once=4)


def penalise_long_prompts(doors: Doors) -> str:
    prompts = [[(7 * i + row) % 40_000 for i in range(4000)] for row in range(4)]
    return answers(
        doors,
        [
            infer_request(
                "generation_unary",
                input_ids=[prompt],
                max_tokens=[[200]],
                repetition_penalty=np.array([[1.1]], np.float32),
            )
            for prompt in prompts
        ],
    )


def search_with_numbers_at_their_edges(doors: Doors) -> str:
    """Ask for beams whose scores or temperature would overflow."""
    numbers: list[dict[str, Any]] = [
        {"len_penalty": 2000.0},
        {"len_penalty": -3e38},
        {"temperature": 1e-45},
        {"temperature": 3e38},
    ]
    return answers(doors, [_prompt(max_tokens=8, beam_width=4, **one) for one in numbers])


def send_forged_ids(doors: Doors) -> str:
    """Send ids that would begin a line of the log, steer a terminal, or fill a disk."""
    ids = ["a\n2026-01-01 00:00:00 ERROR engine[1] forged", "\x1b[31mred", "x" * 1_000_000]
    return answers(doors, [_prompt(request_id=one) for one in ids])


def stop_the_victims_request(doors: Doors) -> str:
    """Stop the victim's request by its id, from another connection."""
    return stream_of_attacks(
        doors, lambda _: infer_request("generation_unary", VICTIM_REQUEST_ID, stop=[[True]]), at_once=1
    )


def send_chains_of_rules(doors: Doors) -> str:
    """Send guides whose rules, references or members are thousands deep: compilers go down by recursion."""
    names = [f"{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(600)]
    links = {name: {"items": {"$ref": f"#/$defs/{after}"}} for name, after in itertools.pairwise(names)}
    deep = json.dumps({"$ref": f"#/$defs/{names[0]}", "$defs": {**links, names[-1]: {"type": "string"}}})
    lark = "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(3000)) + 'a3000: "x"'
    gbnf = "root ::= a0\n" + "".join(f"a{i} ::= a{i + 1} b\n" for i in range(3000)) + 'a3000 ::= "x"\nb ::= "y"'
    wide = json.dumps({"allOf": [{"properties": {f"k{i}": {"type": "string"}}} for i in range(1400)]})
    guides = [("ebnf_grammar", lark), ("ebnf_grammar", gbnf), ("json_schema", deep), ("json_schema", wide)]
    return answers(doors, [_guided_by(kind, text) for kind, text in guides])


def send_guides_that_never_end(doors: Doors) -> str:
    """Send guides that take minutes to compile, and guides that take no time meanwhile."""
    meet = " & ".join(f"/.*a.{{{i}}}/" for i in range(1, 40))
    patterns = json.dumps({"allOf": [{"type": "string", "pattern": f"a{{{i}}}.*b{{{i}}}"} for i in range(1, 60)]})
    hostile = [("ebnf_grammar", f"start: T\nT: {meet}"), ("json_schema", patterns)]
    requests = [_guided_by(kind, text) for kind, text in hostile]
    return answers(doors, [*requests, *(_guided_by("regex", f"[a-z]{{{i}}}") for i in range(1, 5))], at_once=6)


def search_with_large_length_penalties(doors: Doors) -> str:
    penalties = (2000.0, -2000.0, 3e38, 1e-45)
    return answers(
        doors, [_prompt(beam_width=2, max_tokens=8, len_penalty=np.float32(penalty)) for penalty in penalties]
    )


def send_long_chats(doors: Doors) -> str:
    """Send chats of 4 MB, four at a time."""
    chat = json.dumps([{"role": "user", "content": "a b " * ((4 << 20) // 4 - 1000)}])
    return stream_of_attacks(doors, lambda _: _chat(chat), at_once=4)


def send_many_messages(doors: Doors) -> str:
    """Send chats of 90,000 messages."""
    chat = json.dumps([{"role": "user", "content": "a"}] * 90_000, separators=(",", ":"))
    return stream_of_attacks(doors, lambda _: _chat(chat), at_once=2)


def send_a_role_of_four_megabytes(doors: Doors) -> str:
    """Send a message of 4 MB that is refused: the error must not have all of it."""
    chat = json.dumps([{"role": 7, "content": "x" * 4_000_000}])
    with grpc.insecure_channel(doors.grpc_url, GRPC_OPTIONS) as channel:
        try:
            GRPCInferenceServiceStub(channel).ModelInfer(_chat(chat), TIMEOUT_S, metadata=[*doors.headers.items()])
        except grpc.RpcError as error:
            return f"{error.code().name}, {'some lines' if len(error.details()) < 1000 else len(error.details())}"
    return "answered"


def send_hostile_templates(doors: Doors, hidden_size: int = 576) -> str:
    """Upload adapters whose chat templates never end, fill the memory or write 5 MB, and ask them for chats.

    hidden_size: of the model, by default of the default model.
    """
    templates = (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 10**9 }}",
        "{{ messages[0].content }}{{ 'x' * 5 * 2**20 }}",
    )
    uploads = [
        infer_request(
            "generation_unary",
            lora_task_id=np.array([[6_000_000 + i]], np.uint64),
            lora_weights_fp32=np.zeros((1, 1, 2 * hidden_size), np.float32),
            lora_config=[[[_ATTENTION_OUT, 0, 1]]],
            lora_use=np.array([[join_use_files({"chat_template.jinja": template})]], object),
        )
        for i, template in enumerate(templates)
    ]
    uploaded = answers(doors, uploads)
    if uploaded != f"{len(uploads)} x answered":
        return f"uploads: {uploaded}"
    chat = json.dumps([{"role": "user", "content": "Who are you?"}])
    ids = [np.array([[6_000_000 + i]], np.uint64) for i in range(len(uploads))]
    return stream_of_attacks(
        doors,
        lambda number: infer_request(
            "generation_unary", messages=[[chat]], max_tokens=[[1]], lora_task_id=ids[number % len(ids)]
        ),
    )


def upload_under_forged_names(doors: Doors) -> str:
    """Send 48 adapters of 9 MB at once for the default model, each under another client's name."""
    width, config = 64 * 2 * 576, [[_ATTENTION_OUT, layer, 64] for layer in range(30)]
    weights = np.zeros((1, len(config), width), np.float32)
    requests = [
        infer_request(
            "generation_unary",
            lora_task_id=np.array([[5_000_000 + i]], np.uint64),
            lora_weights_fp32=weights,
            lora_config=[config],
        )
        for i in range(48)
    ]
    return answers(doors, requests, at_once=16, clients=[f"client-{i}" for i in range(48)])


ENGINE_ATTACKS: Mapping[str, Attack] = {
    "8 rows x beam 8 x 65,536 stop words": send_words_times_beams,
    "64 sequences x 65,536 stop words": send_words_times_sequences,
    "lists of 300,000 and 1,000,000 ids": send_word_lists,
    "as many words as allowed, again and again": send_as_many_words_as_allowed,
    "the same with 8 beams": send_as_many_words_as_allowed_to_beams,
    "a stop word of 65,001 characters": send_one_long_repetitive_word,
    "64 schemas of 58 kB in a request": send_many_schemas,
    "16 schemas of 58 kB in a request, again and again": send_as_many_schemas_as_allowed,
    "100 guides that overflow, never end, fill the memory": send_hostile_guides,
    "4 x 128 sequences": send_many_sequences,
    "64 rows x 128 sequences": send_rows_times_sequences,
    "32,768 biases, again and again": send_as_many_biases_as_allowed,
    "4 x the logits of 1,300 tokens": ask_for_logits,
    "logits of 341 tokens, again and again": ask_for_as_many_logits_as_allowed,
    "logits of 85 tokens of the victim's model": ask_the_victims_model_for_as_many_logits_as_allowed,
    "4 repetition penalties over 4,000 tokens": penalise_long_prompts,
    "beams with a length penalty of 2,000, a temperature of 1e-45": search_with_numbers_at_their_edges,
    "request ids with a newline, an escape, of 1 MB": send_forged_ids,
    "stop by the victim's id": stop_the_victims_request,
    "48 uploads of 9 MB under 48 forged names": upload_under_forged_names,
}
"""The attacks by their names in a table."""

SHARED_ATTACKS: Mapping[str, Attack] = {
    "guides of 3,000 rules, 600 references, 1,400 parts": send_chains_of_rules,
    "guides that never end, and others beside them": send_guides_that_never_end,
    "beams with length penalties beyond numbers": search_with_large_length_penalties,
    "chats of 4 MB, again and again": send_long_chats,
    "chats of 90,000 messages, again and again": send_many_messages,
    "a message of 4 MB that is refused": send_a_role_of_four_megabytes,
    "chat templates that never end, fill the memory, write 5 MB": send_hostile_templates,
}
"""Those that are tried behind the proxy and with API keys, too."""


def _prompt(request_id: str = "", rows: int = 1, **options: Any) -> service_pb2.ModelInferRequest:
    """Rows of the same prompt and options; a list is the value of one row."""
    options = {"max_tokens": 16, "end_id": -1} | options
    tensors = {name: [value if isinstance(value, list) else [value]] * rows for name, value in options.items()}
    return infer_request("generation_unary", request_id, text_input=[["Tell a story."]] * rows, **tensors)


def _chat(messages: str) -> service_pb2.ModelInferRequest:
    return infer_request("generation_unary", messages=[[messages]], max_tokens=[[1]])


def _guided_by(kind: str, text: str) -> service_pb2.ModelInferRequest:
    return _prompt(max_tokens=8, guided_decoding_guide_type=kind, guided_decoding_guide=text)


def _with_logits(model: str, num_tokens: int) -> service_pb2.ModelInferRequest:
    return infer_request(model, input_ids=[[9] * num_tokens], max_tokens=[[1]], return_context_logits=[[True]])


def _guided(guides: list[tuple[str, str]]) -> service_pb2.ModelInferRequest:
    """guides: their types and texts, each for a row."""
    return infer_request(
        "generation_unary",
        text_input=[["Answer in this form."]] * len(guides),
        max_tokens=[[64]] * len(guides),
        guided_decoding_guide_type=[[kind] for kind, _ in guides],
        guided_decoding_guide=[[text] for _, text in guides],
    )


def hostile_guide(number: int) -> tuple[str, str]:
    """The type and text of a guide, one for each number; twelve kinds take turns."""
    makers = (
        lambda n: ("ebnf_grammar", _rules(": ", "start", 3000 + n, "")),
        lambda n: ("ebnf_grammar", _rules(" ::= ", "root", 2500 + n, " b")),
        lambda n: ("json_schema", _references('{"items":REF}', 1200 + n)),
        lambda n: ("json_schema", _references('{"properties":{"a":REF}}', 1000 + n)),
        lambda n: ("json_schema", _references('{"allOf":[REF]}', 1200 + n)),
        lambda n: ("ebnf_grammar", f'start: p::{2**64 - 1 - n:#x}\np::_ : "a" p::incr(_) | p::decr(_) "b"'),
        lambda n: ("ebnf_grammar", "start: T\nT: " + " & ".join(f"/.*a.{{{i}}}/" for i in range(1, 40 + n))),
        lambda n: ("json_schema", json.dumps({"allOf": [_pattern(i) for i in range(1, 60 + n)]})),
        lambda n: ("regex", rf"(\p{{L}}*\p{{Lu}}\p{{L}}{{{200 + n}}}b)"),
        lambda n: ("ebnf_grammar", f"start: s\ns: A s | B s | A\nA: /[a-z]/\nB: /[a-{chr(100 + n)}]/"),
        lambda n: ("regex", "many words that are forced " * 2000 + str(n)),
        lambda n: ("json_schema", _schema(n)),
    )
    return makers[number % len(makers)](number // len(makers))


def _rules(defines: str, start: str, number: int, end: str) -> str:
    """A chain of so many rules."""
    rules = "\n".join(f"a{i}{defines}a{i + 1}{end}" for i in range(number))
    return f'{start}{defines}a0\n{rules}\na{number}{defines}"x"\nb{defines}"y"'


def _references(link: str, number: int) -> str:
    """A chain of so many references, each in the place of REF."""
    links = {f"{i}": json.loads(link.replace("REF", f'{{"$ref":"#/$defs/{i + 1}"}}')) for i in range(number)}
    schema = {"$ref": "#/$defs/0", "$defs": {**links, f"{number}": {"type": "integer"}}}
    return json.dumps(schema, separators=(",", ":"))


def _pattern(number: int) -> Mapping[str, str]:
    return {"type": "string", "pattern": f"a{{{number}}}.*b{{{number}}}"}


def _schema(seed: int) -> str:
    """A schema of 58 kB, another one for each seed."""
    kinds = {name: {"type": ["string", "integer"], "pattern": "^[a-z]{4}$"} for name in "abc"}
    members = {f"k{seed:07}_{i:03}": {"type": "object", "properties": kinds} for i in range(250)}
    return json.dumps({"type": "object", "properties": members})


def _letters(number: int) -> list[str]:
    """Different words of one character each."""
    return [chr(0x10000 + i) for i in range(number)]


def _words(seed: int, number: int) -> list[str]:
    return [f"{chr(97 + seed % 26)}{i:x}" for i in range(number)]


def _word_list(number: int) -> list[list[int]]:
    """Words of one token each, in upstream's form."""
    return [[i % 40_000 for i in range(number)], list(range(1, number + 1))]
