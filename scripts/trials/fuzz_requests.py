"""Requests that are wrong in every way a client can be wrong, each made from a valid one by a seed and a number.

A request has the form of the wire: tensors whose names, types, shapes and bytes need not fit each other.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from tritonclient.utils import triton_to_np_dtype

from trials.wire_requests import (
    CACHED_TASK_ID,
    DOORS,
    InputSpec,
    ModelFacts,
    WireRequest,
    WireTensor,
    random_adapter,
    random_files,
    tensor,
    text_tensor,
    valid_request,
    word_tensors,
)

_NUMBERS = ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64")
_TYPES = (*_NUMBERS, "BYTES", "BF16")
_FOREIGN_TYPES = ("", "FOO", "int32", "TYPE_INT32", "STRING")
_BROKEN_UTF8 = (b"\xff\xfe", b"\xed\xa0\x80", b"\xc0\x80", b"abc\xe2\x82", b"\xf4\x90\x80\x80", b"ok\x80")
_STRANGE_TEXTS = (
    "",
    " ",
    "\0",
    "\ufeff",
    "<|im_end|>",
    "e" + "\u0301" * 2000,
    "👩‍👩‍👧‍👦" * 50,
    "\u202e" * 99,
    "a\r\n" * 99,
)
_SIZES = (0, 1, 2, 7, 64, 65, 1000)


@dataclass(frozen=True)
class Case:
    """One request. kind: the change to a valid request, `nothing` leaves it as it is."""

    number: int
    kind: str
    request: WireRequest


def make_case(seed: int, number: int, facts: ModelFacts, timeout_s: float) -> Case:
    """A case, the same for the same seed and number. timeout_s: told to the server, where the door passes it on."""
    random = Random(f"{seed} {number}")
    door = random.choice(list(DOORS))
    request = valid_request(random, door, number, facts)
    request.parameters["timeout"] = round(timeout_s * 1e6)
    kind = random.choice(list(MUTATIONS))
    if kind != NOTHING and request.find("lora_weights"):
        # The changed weights must not take the place of a valid adapter's.
        request.put(tensor("lora_task_id", [random.getrandbits(64) | 2**63], "UINT64"))
    MUTATIONS[kind](random, request, facts)
    return Case(number, kind, request)


def _nothing(random: Random, request: WireRequest, facts: ModelFacts) -> None:
    pass


def _missing(random: Random, request: WireRequest, facts: ModelFacts) -> None:
    request.tensors.remove(random.choice(request.tensors))


def _unknown(random: Random, request: WireRequest, facts: ModelFacts) -> None:
    datatype = random.choice(_TYPES)
    request.tensors.append(WireTensor("no_such_input", datatype, [1, 1], bytes(_size_of(datatype))))


def _twice(random: Random, request: WireRequest, facts: ModelFacts) -> None:
    request.tensors.append(random.choice(request.tensors))


def _contradiction(random: Random, request: WireRequest, facts: ModelFacts) -> None:
    """Adds inputs of the model, with values that are valid by themselves."""
    known = facts.inputs[request.model]
    for name in random.sample(sorted(known), random.randint(1, 6)):
        request.put(_any_tensor(random, name, known[name]))


def _wrong_type(random: Random, request: WireRequest, facts: ModelFacts) -> None:
    victim = _copy_of_one(random, request)
    victim.datatype = random.choice((*_TYPES, *_FOREIGN_TYPES))
    if random.random() < 0.5:
        victim.data = bytes(_size_of(victim.datatype) * max(1, int(np.prod(victim.shape))))


def _wrong_shape(random: Random, request: WireRequest, facts: ModelFacts) -> None:
    """Gives a tensor another shape, and keeps its bytes."""
    victim = _copy_of_one(random, request)
    sizes = (-1, 0, 1, 2, 3, 65, 2**31, 2**40, 2**62)
    victim.shape = [random.choice(sizes) for _ in range(random.randint(0, 5))]


def _reshaped(random: Random, request: WireRequest, facts: ModelFacts) -> None:
    """Gives a tensor another shape, and as many values as this shape has."""
    victim = _copy_of_one(random, request)
    shape = [random.choice(_SIZES) for _ in victim.shape]
    shape = shape if random.random() < 0.5 else [1, *shape[1:]]
    shape = random.choice((shape, [1, *victim.shape], victim.shape[1:], [2, *victim.shape[1:]]))
    count = min(int(np.prod(shape)), 100_000)
    if victim.datatype == "BYTES":
        victim.data = _packed([b"text"] * count)
    else:
        victim.data = (victim.data * (count + 1))[: count * _size_of(victim.datatype)]
    victim.shape = shape


def _extreme(random: Random, request: WireRequest, facts: ModelFacts) -> None:
    """Gives a tensor numbers at the ends of their type's range, and around zero."""
    known = facts.inputs[request.model]
    numbers = [name for name, spec in known.items() if spec.datatype in ("INT32", "INT64", "UINT64", "FP32")]
    if "generate" in request.door:  # nothing would end a long answer: the door passes no timeout on
        numbers = [name for name in numbers if name not in ("max_tokens", "request_output_len")]
    present = [t.name for t in request.tensors if t.name in numbers]
    for name in random.sample(present or numbers, 1) + random.sample(numbers, random.randint(0, 1)):
        spec, values = known[name], (0, 1, -1, 2**31 - 1, -(2**31), 2**15, -5, 2**63, 2**64 - 1, 1e38, -1e38, 1e-45)
        request.put(tensor(name, [_clipped(random.choice(values), spec.datatype)], spec.datatype))


def _not_finite(random: Random, request: WireRequest, facts: ModelFacts) -> None:
    known = facts.inputs[request.model]
    names = [name for name, spec in known.items() if spec.datatype == "FP32" and len(spec.dims) == 1]
    value = random.choice((np.nan, np.inf, -np.inf))
    request.put(tensor(random.choice(names), [value], "FP32"))


def _wrong_count(random: Random, request: WireRequest, facts: ModelFacts) -> None:
    """Makes two lists that belong together, or a list and its length, differ."""
    count = random.choice((0, 1, 3, 50))
    match random.randrange(5):
        case 0:
            request.put(tensor("embedding_bias_weights", [1.0] * count, "FP32"))
        case 1:
            request.put(tensor("input_ids", [5] * count, "INT32"))
            request.put(tensor("input_lengths", [random.choice((-1, 0, 2, 51))], "INT32"))
        case 2:
            name = random.choice(("bad_words_list", "stop_words_list"))
            ends = [random.choice((-1, 0, 1, 2, 99, -2)) for _ in range(count)]
            request.put(tensor(name, [[7] * count, ends], "INT32"))
        case 3:
            request.put(tensor("decoder_input_ids", [5] * count, "INT32"))
            request.put(tensor("decoder_input_lengths", [random.choice((-1, 0, 2, 51))], "INT32"))
        case _:
            request.put(tensor("embedding_bias", [0.5] * random.choice((1, facts.vocab_size + 1)), "FP32"))


def _broken_text(random: Random, request: WireRequest, facts: ModelFacts) -> None:
    texts = _text_tensors(request)
    if not texts:
        texts = [text_tensor("stop_words", "x")]
    victim = random.choice(texts)
    request.put(WireTensor(victim.name, "BYTES", [1, 1], _packed([random.choice(_BROKEN_UTF8)])))


def _strange_text(random: Random, request: WireRequest, facts: ModelFacts) -> None:
    name = random.choice(
        ("text_input", "stop_words", "bad_words", "embedding_bias_words", "lora_name", "decoder_text_input")
    )
    words = [random.choice(_STRANGE_TEXTS) for _ in range(random.choice((1, 1, 40)))]
    request.put(tensor(name, [word.encode() for word in words], "BYTES"))


def _huge_text(random: Random, request: WireRequest, facts: ModelFacts) -> None:
    size = random.choice((1_000, 10_000, 10_000, 100_000)) if random.random() < 0.95 else 5_000_000
    name = random.choice(("text_input", "text_input", "stop_words", "bad_words", "guided_decoding_guide", "messages"))
    request.put(text_tensor(name, random.choice(("a", "word ", "語", "{")) * size))


def _broken_adapter(random: Random, request: WireRequest, facts: ModelFacts) -> None:
    """Adds an adapter under an id of its own, with one fault."""
    for part in random_adapter(random, random.getrandbits(64) | 2**63, facts):
        request.put(part)
    weights, config = request.find("lora_weights"), request.find("lora_config")
    assert weights is not None
    assert config is not None
    match random.randrange(8):
        case 0:
            request.tensors.remove(random.choice((weights, config)))
        case 1:
            bad = random.choice((np.nan, np.inf))
            weights.data = np.full(weights.shape, bad, np.float16).tobytes()
        case 2:
            rows, columns = config.shape[1], random.choice((0, 1, 2, 3, 4, 5))
            values = [[random.choice((-1, 0, 1, 7, 99, 2**31 - 1)) for _ in range(columns)] for _ in range(rows)]
            request.put(tensor("lora_config", np.array(values, np.int32).reshape(rows, columns), "INT32"))
        case 3:
            config.shape, config.data = [1, config.shape[1] * 2, 3], config.data * 2
        case 4:
            weights.shape, weights.data = [1, weights.shape[1] + 1, 1], bytes(2 * (weights.shape[1] + 1))
        case 5:
            request.put(tensor("lora_weights_fp32", np.zeros(weights.shape[1:], np.float32), "FP32"))
        case 6:
            request.put(tensor("lora_task_id", [random.choice((0, 2**64 - 1, CACHED_TASK_ID))], "UINT64"))
        case _:
            weights.shape, weights.data = [2, *weights.shape[1:]], weights.data * 2


def _broken_files(random: Random, request: WireRequest, facts: ModelFacts) -> None:
    """Adds an adapter as PEFT's files under an id of its own, with one fault or with sizes of another model."""
    parts = random_files(random, random.getrandbits(64) | 2**63, facts)
    _, config, weights = parts
    for part in parts:
        request.put(part)
    header_bytes = int.from_bytes(weights.data[:8], "little")
    match random.randrange(10):
        case 0:
            request.tensors.remove(random.choice((weights, config)))
        case 1:
            weights.data = weights.data[: random.randrange(len(weights.data))]
            weights.shape = [1, len(weights.data)]
        case 2:
            place = random.randrange(8 + header_bytes)
            weights.data = weights.data[:place] + bytes([random.randrange(256)]) + weights.data[place + 1 :]
        case 3:
            weights.data = weights.data[: 8 + header_bytes] + b"\xff" * (len(weights.data) - 8 - header_bytes)
        case 4:
            text = random.choice(
                ("", "{", "[" * 200_000, "null", '{"r": 1e999}', '{"peft_type": "IA3"}', "x" * (2 << 20))
            )
            request.put(text_tensor("lora_peft_config", text))
        case 5:
            fields = {"r": 2, "lora_alpha": 2, "rank_pattern": {"(a+)+$": 2}, "target_modules": "(a|a)*$"}
            request.put(text_tensor("lora_peft_config", json.dumps(fields)))
        case 6:
            for part in random_adapter(random, random.getrandbits(64) | 2**63, facts):
                request.put(part)
        case 7:
            weights.shape = [2, *weights.shape[1:]]
            weights.data *= 2
        case 8:
            names = (
                "experts",
                "experts.base_layer",
                "experts.99999.w1",
                "experts.gate_up_proj",
                "experts.down_projs.0",
            )
            header = weights.data[8 : 8 + header_bytes].replace(
                b"self_attn.q_proj", f"mlp.{random.choice(names)}".encode()
            )
            weights.data = len(header).to_bytes(8, "little") + header + weights.data[8 + header_bytes :]
            weights.shape = [1, len(weights.data)]
        case _:
            pass


def _broken_version(random: Random, request: WireRequest, facts: ModelFacts) -> None:
    """Asks for a version, a session or defaults that cannot be meant, or sends what an adapter's use cannot be."""
    digests = ("", "0" * 31, "0" * 32, "0" * 33, "A" * 32, "g" * 32, "0" * 64, "０" * 32, "0" * 32 + "\n", "0" * 9999)
    uses = [
        "",
        "{",
        "null",
        "[]",
        '{"multilora.json": 1}',
        '{"../config.json": "{}"}',
        '{"generation_config.json": "["}',
    ]
    uses += ['{"multilora.json": "{\\"max_tokens\\": 1e999}"}', '{"chat_template.jinja": "{% for x in %}"}', "[" * 9999]
    uses += [json.dumps({"chat_template.jinja": "{% for x in range(10 ** 9) %}x{% endfor %}"})]
    match random.randrange(5):
        case 0:
            request.put(text_tensor("lora_expected_digest", random.choice(digests)))
        case 1:
            name = random.choice(("nobody", "Nobody", "7", "nobody/7", "a/b/c", "x" * 97))
            request.put(text_tensor("lora_name", name))
            request.put(text_tensor("lora_expected_digest", "0" * 32))
        case 2:
            session = random.choice((*_STRANGE_TEXTS, "x" * 1024, "x" * 1025, "é" * 1024))
            request.put(text_tensor("lora_session", session))
        case 3:
            names = ["temperature", "no_such_input", "lora_weights", "", *_STRANGE_TEXTS, "max_tokens"]
            request.put(word_tensors(default_inputs=random.sample(names, random.randint(1, len(names))))[0])
        case _:
            for part in random_adapter(random, random.getrandbits(64) | 2**63, facts):
                request.put(part)
            request.put(text_tensor("lora_use", random.choice(uses)))


def _broken_chat(random: Random, request: WireRequest, facts: ModelFacts) -> None:
    chats = ["", "[", "{}", "null", "[]", "[1]", '[{"role": "user"}]', '[{"role": 7, "content": "x"}]', "[" * 5000]
    chats += ['{"messages": 1}', '[{"role": "user", "content": {"a": [1]}}]', '"text"', "1e999", '[{"role": "nobody"}]']
    request.tensors = [t for t in request.tensors if t.name != "text_input"]
    request.put(text_tensor("messages", random.choice(chats)))


def _broken_guide(random: Random, request: WireRequest, facts: ModelFacts) -> None:
    kinds = ("json", "json_schema", "regex", "ebnf_grammar", "structural_tag", "nonsense", "")
    guides = ["", "(", "[a-z", "{", '{"type": 5}', '{"$ref": "#/x"}', "root ::= root", "start: start", "a{1,100000}"]
    guides += ['{"type": "object", "properties": {"a": {"type": "integer"}}}', "(a|b)*", 'start: "x"', "\\p{Foo}"]
    request.put(text_tensor("guided_decoding_guide_type", random.choice(kinds)))
    request.put(text_tensor("guided_decoding_guide", random.choice(guides)))


def _stop(random: Random, request: WireRequest, facts: ModelFacts) -> None:
    request.put(tensor("stop", [True], "BOOL"))
    request.request_id = random.choice(("", request.request_id, "somebody else's", "x" * 5000))


def _wrong_head(random: Random, request: WireRequest, facts: ModelFacts) -> None:
    """Changes the parts of a request beside its tensors."""
    match random.randrange(5):
        case 0:
            request.model = random.choice(("nobody", "..", "generation%00", "x" * 1000))
        case 1:
            request.version = random.choice(("2", "-1", "one", "99999999999999999999"))
        case 2:
            request.outputs = random.choice((["nothing"], ["text_output"] * 3, ["text_output", "nothing"]))
        case 3:
            request.parameters["timeout"] = random.choice((-1, 0, 1, 1000, 2**62))
        case _:
            name = random.choice(("priority", "sequence_id", "sequence_start", "unheard_of", "timeout"))
            request.parameters[name] = random.choice((2**63 - 1, -1, "text", True))


def _damaged_bytes(random: Random, request: WireRequest, facts: ModelFacts) -> None:
    """Gives a tensor fewer, more or other bytes than its shape promises."""
    victim = _copy_of_one(random, request)
    match random.randrange(3):
        case 0:
            victim.data = victim.data[: random.randrange(len(victim.data) + 1)]
        case 1:
            victim.data += random.randbytes(random.choice((1, 4, 1000)))
        case _:
            # The length of a text comes first in its bytes. Other numbers are for `extreme`, which knows its limits.
            victim.data = struct.pack("<I", random.choice((0, 2**31, 2**32 - 1, 5))) + victim.data[4:]


def _damaged_body(random: Random, request: WireRequest, facts: ModelFacts) -> None:
    """Damages a body of JSON; behind doors without one, the bytes of a tensor."""
    if not request.door.startswith("HTTP"):
        _damaged_bytes(random, request, facts)
        return
    start, flip = random.random(), random.randrange(1, 256)
    kind = random.randrange(4)

    def damage(body: bytes) -> bytes:
        place = int(start * len(body))
        if kind == 0:
            return body[:place]
        if kind == 1:
            return body[:place] + bytes([body[place] ^ flip]) + body[place + 1 :]
        return (b"[" * 20_000, b"{" * 5 + body)[kind - 2]

    request.body_damage = damage


NOTHING = "nothing"
"""The kind of a request that stays valid."""

MUTATIONS: Mapping[str, Callable[[Random, WireRequest, ModelFacts], None]] = {
    NOTHING: _nothing,
    "missing": _missing,
    "unknown": _unknown,
    "twice": _twice,
    "contradiction": _contradiction,
    "wrong type": _wrong_type,
    "wrong shape": _wrong_shape,
    "reshaped": _reshaped,
    "extreme": _extreme,
    "not finite": _not_finite,
    "wrong count": _wrong_count,
    "broken text": _broken_text,
    "strange text": _strange_text,
    "huge text": _huge_text,
    "broken adapter": _broken_adapter,
    "broken files": _broken_files,
    "broken version": _broken_version,
    "broken chat": _broken_chat,
    "broken guide": _broken_guide,
    "stop": _stop,
    "wrong head": _wrong_head,
    "damaged bytes": _damaged_bytes,
    "damaged body": _damaged_body,
}
"""By kind, the function that changes a valid request in place."""


def _any_tensor(random: Random, name: str, spec: InputSpec) -> WireTensor:
    shape = [random.choice((1, 2, 3)) if size < 0 else size for size in spec.dims]
    if spec.datatype == "BYTES":
        return WireTensor(name, "BYTES", [1, *shape], _packed([b"word"] * int(np.prod(shape))))
    if spec.datatype == "BF16":
        return WireTensor(name, "BF16", [1, *shape], bytes(2 * int(np.prod(shape))))
    value = random.choice((0, 1, 1, 2, 3))
    return tensor(name, np.full(shape, value, triton_to_np_dtype(spec.datatype)), spec.datatype)


def _copy_of_one(random: Random, request: WireRequest) -> WireTensor:
    """One of the request's tensors, in a copy that belongs to the request alone."""
    index = random.randrange(len(request.tensors))
    old = request.tensors[index]
    request.tensors[index] = WireTensor(old.name, old.datatype, list(old.shape), old.data)
    return request.tensors[index]


def _text_tensors(request: WireRequest) -> list[WireTensor]:
    return [t for t in request.tensors if t.datatype == "BYTES"]


def _packed(texts: Sequence[bytes]) -> bytes:
    """Texts as Triton lays them out."""
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def _size_of(datatype: str) -> int:
    if datatype in ("BYTES", "BF16") or datatype not in _TYPES:
        return 4 if datatype == "BYTES" else 2
    return int(np.dtype(triton_to_np_dtype(datatype)).itemsize)


def _clipped(value: float, datatype: str) -> float:
    if datatype == "FP32":
        return value
    limits = np.iinfo(triton_to_np_dtype(datatype))
    return min(max(int(value), int(limits.min)), int(limits.max))
