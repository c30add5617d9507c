"""Valid requests to every door, as they go over the wire: names, types, shapes and bytes of tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from safetensors.numpy import save
from tritonclient.utils import serialize_byte_tensor, triton_to_np_dtype

CACHED_TASK_ID = 900_000_001
"""The adapter that the server has before the first request."""

FIRST_NEW_TASK_ID = 910_000_000
_NUM_NEW_TASK_IDS = 64
_USE = json.dumps({"multilora.json": json.dumps({"system_prompt": "Be brief. 🦜", "max_tokens": 4})})
"""The files about an adapter's use that some valid requests send with its weights."""

DOORS: Mapping[str, str] = {
    "gRPC": "generation_unary",
    "gRPC ensemble": "ensemble_unary",
    "gRPC stream": "generation",
    "gRPC stream ensemble": "ensemble",
    "HTTP infer": "generation_unary",
    "HTTP infer ensemble": "ensemble_unary",
    "HTTP generate": "generation_unary",
    "HTTP generate_stream": "generation",
}
"""The doors to which a request can be sent, and the model that it asks there."""

_ENSEMBLE_NAMES = {"runtime_top_k": "top_k", "runtime_top_p": "top_p", "streaming": "stream"}


@dataclass(frozen=True)
class InputSpec:
    """An input in a model's configuration; -1 in `dims` is any number."""

    datatype: str
    dims: tuple[int, ...]


@dataclass
class WireTensor:
    """An input in the form of the wire. Its fields need not fit each other."""

    name: str
    datatype: str
    shape: list[int]
    data: bytes


@dataclass
class WireRequest:
    """A request. body_damage: for doors whose requests are text, the change of that text on the way."""

    door: str
    model: str
    request_id: str
    tensors: list[WireTensor]
    version: str = ""
    outputs: list[str] = field(default_factory=list)
    parameters: dict[str, int | str | bool] = field(default_factory=dict)
    body_damage: Callable[[bytes], bytes] | None = None

    def find(self, name: str) -> WireTensor | None:
        return next((tensor for tensor in self.tensors if tensor.name == name), None)

    def put(self, tensor: WireTensor) -> None:
        """Put a tensor in the place of the tensor of that name, if there is one."""
        self.tensors = [other for other in self.tensors if other.name != tensor.name] + [tensor]


@dataclass(frozen=True)
class ModelFacts:
    """The facts for making requests. inputs: of each model. row_widths: by module id, in + out size of a LoRA row.

    has_encoder: whether requests may begin their answers, and have no chats.
    """

    inputs: Mapping[str, Mapping[str, InputSpec]]
    row_widths: Mapping[int, int]
    num_layers: int
    vocab_size: int
    has_encoder: bool = False


def tensor(name: str, values: Any, datatype: str) -> WireTensor:
    """A tensor of values as nested lists or an array, after a batch dimension of 1."""
    array = np.asarray(values, triton_to_np_dtype(datatype))[np.newaxis]
    data = serialize_byte_tensor(array).item() if datatype == "BYTES" else array.tobytes()
    return WireTensor(name, datatype, list(array.shape), data)


def random_adapter(random: Random, task_id: int, facts: ModelFacts) -> list[WireTensor]:
    """The three tensors of a valid adapter of a few rows."""
    places = [(module, layer) for module in sorted(facts.row_widths) for layer in range(facts.num_layers)]
    chosen = random.sample(places, random.randint(1, min(3, len(places))))
    rank = random.choice((1, 2, 4))
    width = rank * max(facts.row_widths[module] for module, _ in chosen)
    weights = np.zeros((len(chosen), width), np.float16)
    for row, (module, _) in zip(weights, chosen, strict=True):
        size = rank * facts.row_widths[module]
        row[:size] = [random.gauss(0, 0.01) for _ in range(size)]
    return [
        tensor("lora_task_id", [task_id], "UINT64"),
        tensor("lora_weights", weights, "FP16"),
        tensor("lora_config", [[module, layer, rank] for module, layer in chosen], "INT32"),
    ]


def random_files(random: Random, task_id: int, facts: ModelFacts) -> list[WireTensor]:
    """The inputs of an adapter as PEFT's files, whose header is in order, but whose sizes no model needs to have."""
    rank, layer = random.choice((1, 2, 4)), random.randrange(facts.num_layers)
    key = f"base_model.model.model.layers.{layer}.{random.choice(('self_attn.q_proj', 'mlp.down_proj'))}"
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj", "down_proj"]}
    size = random.choice((8, 576))
    tensors = {f"{key}.lora_A.weight": (rank, size), f"{key}.lora_B.weight": (size, rank)}
    weights = save({name: np.full(shape, 0.01, np.float16) for name, shape in tensors.items()})
    return [
        tensor("lora_task_id", [task_id], "UINT64"),
        text_tensor("lora_peft_config", json.dumps(config)),
        tensor("lora_peft_weights", np.frombuffer(weights, np.uint8), "UINT8"),
    ]


def valid_request(random: Random, door: str, number: int, facts: ModelFacts) -> WireRequest:
    model = DOORS[door]
    known = facts.inputs[model]
    # The JSON of `generate` has no place for weights.
    tensors = [_prompt(random, known, facts), *_options(random, number, facts, has_weights="generate" not in door)]
    if facts.has_encoder:
        tensors += _beginning(random, facts)
    tensors.append(tensor("max_tokens", [random.randint(1, 4)], "INT32"))
    if "stream" in door:
        tensors.append(tensor("streaming", [True], "BOOL"))
    if "ensemble" in door:
        tensors = [WireTensor(_ENSEMBLE_NAMES.get(t.name, t.name), t.datatype, t.shape, t.data) for t in tensors]
    return WireRequest(door, model, f"fuzz-{number}", [t for t in tensors if t.name in known])


def _beginning(random: Random, facts: ModelFacts) -> list[WireTensor]:
    """Of an answer, in a form that the door has."""
    token_ids = [random.randrange(facts.vocab_size) for _ in range(random.choice((1, 1, 4)))]
    match random.randrange(4):
        case 0:
            return [tensor("decoder_input_ids", token_ids, "INT32")]
        case 1:
            length = tensor("decoder_input_lengths", [random.randint(0, len(token_ids))], "INT32")
            return [tensor("decoder_input_ids", token_ids, "INT32"), length]
        case 2:
            return [text_tensor("decoder_text_input", random.choice(("", "der", "Es war einmal 🦜")))]
        case _:
            return []


def _prompt(random: Random, known: Mapping[str, InputSpec], facts: ModelFacts) -> WireTensor:
    match random.choice(("text_input", "messages", "input_ids")):
        case "messages" if "messages" in known and not facts.has_encoder:
            return text_tensor("messages", json.dumps([{"role": "user", "content": "Who are you? 🦜"}]))
        case "input_ids" if "input_ids" in known:
            return tensor(
                "input_ids",
                [random.randint(0, min(300, facts.vocab_size - 1)) for _ in range(random.randint(1, 20))],
                "INT32",
            )
        case _:
            return text_tensor("text_input", random.choice(("The sea is", "東京の天気は", "1 2 3", "مرحبا")))


def _options(random: Random, number: int, facts: ModelFacts, has_weights: bool) -> list[WireTensor]:
    """The options of one way to use the server."""
    match random.randrange(11):
        case 0:
            values = {"temperature": 0.7, "runtime_top_p": 0.9, "repetition_penalty": 1.1, "min_p": 0.01}
            return [tensor(name, [value], "FP32") for name, value in values.items()]
        case 1:
            return [
                *word_tensors(embedding_bias_words=["sea", "sky"], bad_words=["fish"], stop_words=["END", "🦜"]),
                tensor("embedding_bias_weights", [1.0, -1.0], "FP32"),
            ]
        case 2:
            numbers = {"num_top_log_probs": 2, "num_prompt_top_log_probs": 3, "truncate_prompt_tokens": 4}
            return [tensor(name, [value], "INT32") for name, value in numbers.items()]
        case 3:
            return word_tensors(guided_decoding_guide_type=["regex"], guided_decoding_guide=["[0-9]{2,4}"])
        case 4:
            return [tensor("seed", [random.getrandbits(64)], "UINT64"), tensor("runtime_top_k", [5], "INT32")]
        case 5:
            start = [] if facts.has_encoder else [tensor("lora_start", [0], "INT32")]
            return [tensor("lora_task_id", [CACHED_TASK_ID], "UINT64"), *random.choice(([], start))]
        case 6 | 7 if has_weights:
            # The same adapter under the same id each time: another one would be refused.
            which = number % _NUM_NEW_TASK_IDS
            use = [text_tensor("lora_use", _USE)] if which % 2 and not facts.has_encoder else []
            return [*random_adapter(Random(which), FIRST_NEW_TASK_ID + which, facts), *use]
        case 8:
            session = text_tensor("lora_session", random.choice(("Ann", "会話 7", "x" * 1024)))
            return [tensor("lora_task_id", [CACHED_TASK_ID], "UINT64"), session]
        case 9:
            defaults = word_tensors(default_inputs=["temperature", "max_tokens"])
            return [tensor("temperature", [0.7], "FP32"), *defaults, tensor("lora_task_id", [CACHED_TASK_ID], "UINT64")]
        case _:
            return []


def text_tensor(name: str, text: str) -> WireTensor:
    return tensor(name, [text.encode()], "BYTES")


def word_tensors(**words: Sequence[str]) -> list[WireTensor]:
    return [tensor(name, [word.encode() for word in values], "BYTES") for name, values in words.items()]
