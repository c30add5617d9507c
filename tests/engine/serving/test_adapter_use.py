"""A chat that an adapter answers is written by what the adapter's folder says, at every door, by the right version."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.fake_triton import FakeRequest, FakeResponse
from support.fronts import TIMEOUT_S
from support.served_engine import served
from transformers import AutoTokenizer, LlamaForCausalLM

from checkpoints.tiny_llama import save_tiny_llama
from multilora_client import load_adapter
from multilora_client.adapter import AdapterFiles
from multilora_engine.config import EngineConfig
from multilora_engine.engine.engine import Engine
from multilora_engine.lora_config import LoRAConfig
from multilora_engine.serving.front import EngineLink
from multilora_engine.serving.generation_front import GenerationFront
from multilora_engine.serving.immediate_model import preprocess
from multilora_engine.serving.inputs import InputTensors
from multilora_wire.headers import CLIENT_HEADER

VOCAB_SIZE = 49152
CHAT = [{"role": "user", "content": "Who are you?"}]
ARR = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}{{ bos_token }}Arr{{ mood }}:"
TERSE = "{{ messages | map(attribute='content') | join('|') }}=>"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory, default_model_dir: Path) -> Path:
    """A tiny model that knows the tokens of the default one."""
    path = save_tiny_llama(tmp_path_factory.mktemp("model"), vocab_size=VOCAB_SIZE)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (path / name).write_bytes((default_model_dir / name).read_bytes())
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return path


def save_folder(model_dir: Path, path: Path, seed: int, **files: Any) -> Path:
    """A folder as a trainer saves it. files: by names with `_` for `.`, what differs from the base model's."""
    torch.manual_seed(seed)
    model = get_peft_model(LlamaForCausalLM.from_pretrained(model_dir), LoraConfig(r=2, target_modules=["q_proj"]))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    model.save_pretrained(path)
    tokenizer_of(model_dir).save_pretrained(path)
    write_files(path, files)
    return path


def save_copy(folder: Path, path: Path, **files: Any) -> Path:
    """The adapter of another folder, with these files of its own."""
    shutil.copytree(folder, path)
    write_files(path, files)
    return path


def write_files(path: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / ".".join(name.rsplit("_", 1))).write_text(text)


@cache
def tokenizer_of(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def adapters(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    config = json.loads((model_dir / "tokenizer_config.json").read_text())
    save_folder(model_dir, root / "plain", 1)
    save_folder(model_dir, root / "arr", 2, chat_template_jinja=ARR)
    other_tokens = config | {"eos_token": "<|endoftext|>"}
    save_folder(model_dir, root / "named", 2, chat_template_jinja=ARR, tokenizer_config_json=other_tokens)
    save_copy(root / "arr", root / "nameless", tokenizer_config_json=config | {"bos_token": None})
    own_name = {
        "tokenizer_config_json": config | {"boi_token": "<|im_start|>"},
        "chat_template_jinja": ARR + "{{ boi_token }}",
    }
    save_copy(root / "arr", root / "own_name", **own_name)
    own = {"system_prompt": "Be brief.", "max_tokens": 3}
    save_folder(model_dir, root / "terse", 3, chat_template_jinja=TERSE, multilora_json=own)
    drawn = {"do_sample": True, "temperature": 0.5, "top_k": 7, "eos_token_id": [9, 2], "max_new_tokens": 5}
    save_folder(model_dir, root / "drawn", 4, generation_config_json=drawn)
    return root


@pytest.fixture(scope="module")
def engine(model_dir: Path, adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    lora = LoRAConfig(
        lora_sources=[{"source": "directory", "root": str(adapters)}],  # type: ignore[list-item]
        lora_cache_dir=tmp_path_factory.mktemp("disk"),
        lora_on_conflict="replace",
    )
    return Engine(EngineConfig(model_path=model_dir, num_threads=1, kv_cache_memory_bytes=8 << 20, lora=lora))


@pytest.fixture
def link(engine: Engine, tmp_path: Path) -> Iterator[EngineLink]:
    with served(engine, tmp_path / "engine.sock"):
        link = EngineLink(tmp_path / "engine.sock")
        link.client.wait_until_ready(TIMEOUT_S)
        yield link
        link.close()


@pytest.fixture
def front(link: EngineLink) -> Iterator[GenerationFront]:
    front = GenerationFront(link, can_stream=True)
    yield front
    front.close()


def ask(front: GenerationFront, tensors: dict[str, Any]) -> list[FakeResponse]:
    request = FakeRequest(tensors)
    front.accept(request)
    responses = request.sender.wait()
    is_row = all(response.error is None and "streaming" not in tensors for response in responses)
    return sorted(responses, key=lambda response: response.arrays["batch_index"].item()) if is_row else responses


def chat(name: str, messages: Any = CHAT, **more: Any) -> dict[str, Any]:
    tensors: dict[str, Any] = {"messages": [[json.dumps(messages)]], "max_tokens": [[4]]} | more
    return tensors | ({"lora_name": [[name]]} if name else {})


def prompt_of(response: FakeResponse) -> list[int]:
    assert response.error is None, response.error.message
    num_tokens = int(response.arrays["num_input_tokens"].item())
    return list(response.arrays["output_ids"].reshape(-1)[:num_tokens].tolist())


def expected(folder: Path, messages: Any = CHAT, **more: Any) -> list[int]:
    tokenizer = tokenizer_of(folder)
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **more)
    return list(tokenizer.encode(rendered, add_special_tokens=False))


def test_two_adapters_in_one_batch_get_each_the_prompt_of_its_folder(front: GenerationFront, adapters: Path) -> None:
    names = ["arr", "plain", "terse", "named", "nameless", "own_name"]
    tensors = {
        "messages": [[json.dumps(CHAT)] for _ in names],
        "lora_name": np.array([[name.encode()] for name in names], object),
        "max_tokens": [[4]] * len(names),
    }
    for _ in range(2):  # first from the source, and then as the front knows them
        responses = ask(front, tensors)
        assert [prompt_of(response) for response in responses] == [
            expected(adapters / "arr"),
            expected(adapters / "plain"),
            expected(adapters / "terse", [{"role": "system", "content": "Be brief."}, *CHAT]),
            expected(adapters / "named"),
            expected(adapters / "nameless"),
            expected(adapters / "own_name"),
        ]
    assert prompt_of(ask(front, chat("arr"))[0]) != prompt_of(ask(front, chat("plain"))[0])


def test_an_answer_tells_whether_the_adapters_template_has_opened_the_thinking(
    front: GenerationFront, adapters: Path
) -> None:
    save_copy(adapters / "plain", adapters / "thinker", chat_template_jinja="{{ messages[0].content }}<think>\n")
    for _ in range(2):  # first from the source, and then as the front knows it
        for name, is_open in (("thinker", [[True]]), ("plain", None)):
            request = FakeRequest(chat(name), output_names=("output_ids", "thinking_is_open"))
            front.accept(request)
            (response,) = request.sender.wait()
            assert response.error is None, response.error.message
            told = response.arrays.get("thinking_is_open")
            assert (told if told is None else told.tolist()) == is_open


def test_the_answer_is_the_adapters_to_that_prompt(front: GenerationFront, adapters: Path) -> None:
    (asked,) = ask(front, chat("arr"))
    by_ids = {"input_ids": [expected(adapters / "arr")], "lora_name": [["arr"]], "max_tokens": [[4]]}
    (told,) = ask(front, by_ids)
    assert asked.arrays["output_ids"].tolist() == told.arrays["output_ids"].tolist()
    assert asked.texts() == told.texts()
    parts = ask(front, chat("arr", streaming=[[True]]))
    assert (
        "".join(part.texts()[0] for part in parts)
        == told.texts()[0][len(told.texts()[0]) - len("".join(part.texts()[0] for part in parts)) :]
    )
    several = ask(front, chat("arr", num_return_sequences=[[2]]))
    assert [prompt_of(response) for response in several] == [expected(adapters / "arr")] * 2


def test_a_requests_own_options_come_first(front: GenerationFront, engine: Engine, adapters: Path) -> None:
    def sampling(**more: Any) -> Any:
        found: list[Any] = []
        make = engine._admission._new_sequences.make

        def spy(request: Any) -> Any:
            found.append(request.sampling)
            return make(request)

        object.__setattr__(engine._admission._new_sequences, "make", spy)
        try:
            tensors = chat("drawn", **more)
            (response,) = ask(front, {name: value for name, value in tensors.items() if value is not None})
            assert response.error is None, response.error.message
        finally:
            object.__delattr__(engine._admission._new_sequences, "make")
        return found[-1]

    own = sampling(max_tokens=None)
    assert (own.temperature, own.top_k, own.max_tokens, own.end_ids, own.end_id) == (0.5, 7, 5, (9, 2), None)
    asked = sampling(temperature=np.array([[0.9]], np.float32), end_id=[[3]], max_tokens=[[2]])
    assert (round(asked.temperature, 3), asked.top_k, asked.max_tokens, asked.end_id) == (0.9, 7, 2, 3)
    assert sampling(runtime_top_k=[[1]]).is_greedy
    # A temperature of 1 alone, which upstream's text clients always send, asks for nothing.
    assert sampling(temperature=np.array([[1.0]], np.float32)).temperature == 0.5
    weak = np.array([[b"temperature", b"max_tokens"]], object)
    defaults = sampling(
        temperature=np.array([[1.0]], np.float32), runtime_top_p=np.array([[1.0]], np.float32), default_inputs=weak
    )
    assert (defaults.temperature, defaults.top_k, defaults.top_p, defaults.max_tokens) == (0.5, 7, 1.0, 5)
    assert sampling(beam_width=[[2]]).temperature == 1.0  # nothing is drawn in a beam search
    text = {"text_input": [["Hi"]], "max_tokens": [[2]], "lora_name": [["drawn"]]}
    assert ask(front, text)[0].error is None  # texts and ids are asked as they are


def test_arguments_of_the_template_and_own_system_messages_pass(front: GenerationFront, adapters: Path) -> None:
    whole = {"messages": CHAT, "chat_template_kwargs": {"mood": "!"}}
    assert prompt_of(ask(front, chat("arr", whole))[0]) == expected(adapters / "arr", mood="!")
    own = [{"role": "system", "content": "Be long."}, *CHAT]
    assert prompt_of(ask(front, chat("terse", own))[0]) == expected(adapters / "terse", own)


def test_an_adapters_own_end_token_ends_its_answers_unless_a_request_has_one(
    front: GenerationFront, adapters: Path
) -> None:
    def answer(name: str, **more: Any) -> tuple[list[int], str]:
        (response,) = ask(front, chat(name, **{"max_tokens": [[12]], **more}))
        whole = response.arrays["output_ids"].reshape(-1).tolist()
        return whole[len(prompt_of(response)) :], response.arrays["finish_reason"].item().decode()

    tokens, reason = answer("plain")
    assert (len(tokens), reason) == (12, "length"), "the base's end token ends it"
    end = next(token for place, token in enumerate(tokens) if place >= 2 and token not in tokens[:place])
    ended = [*tokens[: tokens.index(end)], end]
    save_copy(adapters / "plain", adapters / "ended", generation_config_json={"eos_token_id": [end, 2]})
    for _ in range(2):  # first from the source, and then as the front knows it
        assert answer("ended") == (ended, "stop")
    assert answer("ended", end_id=[[tokens[0]]]) == (tokens[:1], "stop")
    parts = ask(front, chat("ended", max_tokens=[[12]], streaming=[[True]]))
    assert parts[-1].arrays["finish_reason"].item() == b"stop"
    assert [token for part in parts for token in part.arrays["output_ids"].reshape(-1).tolist()] == ended


def test_a_chat_is_refused_by_the_adapters_template_and_limits(front: GenerationFront, adapters: Path) -> None:
    save_copy(adapters / "plain", adapters / "strict", chat_template_jinja="{{ raise_exception('never') }}")
    for _ in range(2):
        (response,) = ask(front, chat("strict"))
        assert response.error is not None
        assert response.error.code == "INVALID_ARG"
        assert "adapter strict: the chat template refused the messages: never" in response.error.message
    (response,) = ask(front, {k: v for k, v in chat("plain").items() if k != "max_tokens"})
    assert response.error is not None
    assert "max_tokens is missing" in response.error.message
    (response,) = ask(front, chat("nobody", max_tokens=[[4]]))
    assert response.error is not None
    assert response.error.code == "NOT_FOUND"
    (response,) = ask(front, chat("arr", messages=[{"role": "user", "content": "a b " * 600}]))
    assert response.error is not None
    assert "max_model_len" in response.error.message


HOSTILE = {
    "endless": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "2 s"),
    "huge": ("{{ 'x' * 10**9 }}", "268435456 bytes of memory"),
    "long": (
        "{{ messages[0].content }}{{ 'x' * 5 * 2**20 }}",
        "5242892 bytes of the messages; a prompt may have 4194304",
    ),
}


def test_a_hostile_template_meets_its_limit_and_holds_up_nobody_else(front: GenerationFront, adapters: Path) -> None:
    for name, (template, _) in HOSTILE.items():
        save_copy(adapters / "plain", adapters / name, chat_template_jinja=template)
    ask(front, chat("arr"))  # the front knows the adapter's template now, and its process runs
    names = ["endless", *HOSTILE]
    attacks = [FakeRequest(chat(name), headers={CLIENT_HEADER: "hostile"}) for name in names]
    for attack in attacks:
        front.accept(attack)
    victim = FakeRequest(chat("arr"), headers={CLIENT_HEADER: "victim"})
    front.accept(victim)
    (response,) = victim.sender.wait()
    assert prompt_of(response) == expected(adapters / "arr")
    assert not all(attack.sender.responses for attack in attacks)
    for attack, name in zip(attacks, names, strict=True):
        (response,) = attack.sender.wait()
        assert response.error is not None
        assert response.error.code == "INVALID_ARG"
        assert f"adapter {name}: " in response.error.message
        assert HOSTILE[name][1] in response.error.message


def test_a_replaced_adapter_answers_with_its_own_template(
    front: GenerationFront, adapters: Path, tmp_path: Path
) -> None:
    def upload(folder: Path) -> str:
        content = load_adapter(folder).content
        assert isinstance(content, AdapterFiles)
        tensors: dict[str, Any] = {
            "lora_name": [["moving"]],
            "lora_peft_config": np.array([[content.config]], object),
            "lora_peft_weights": np.frombuffer(bytearray(content.weights), np.uint8)[None],
            "lora_use": np.array([[content.use]], object),
        }
        (response,) = ask(front, tensors)
        assert response.error is None, response.error.message
        return bytes(response.arrays["lora_digest"].item()).decode()

    one = save_copy(adapters / "plain", tmp_path / "one", chat_template_jinja="1 {{ messages[0].content }}")
    two = save_copy(adapters / "plain", tmp_path / "two", chat_template_jinja="2 {{ messages[0].content }}")
    none = adapters / "plain"
    digests = []
    for folder in (one, two, one, none, two):
        digests.append(upload(folder))
        (response,) = ask(front, chat("moving"))
        assert prompt_of(response) == expected(folder)
        assert bytes(response.arrays["lora_digest"].item()).decode() == digests[-1]
    assert len(set(digests)) == 3
    assert digests[0] == digests[2]


def test_the_ensembles_first_step_leaves_chats_of_adapters_to_the_generation_model(
    front: GenerationFront, link: EngineLink, adapters: Path
) -> None:
    first = preprocess(
        InputTensors(FakeRequest({"MESSAGES": [[json.dumps(CHAT)]], "LORA_NAME": [["arr"]]})), *link.describe()
    )
    assert first["REQUEST_INPUT_LEN"].tolist() == [[0]]
    tensors = chat("arr")
    tensors["left_messages"] = tensors.pop("messages")
    (response,) = ask(front, tensors | {"input_ids": first["INPUT_ID"], "input_lengths": first["REQUEST_INPUT_LEN"]})
    assert prompt_of(response) == expected(adapters / "arr")
    base = preprocess(InputTensors(FakeRequest({"MESSAGES": [[json.dumps(CHAT)]]})), *link.describe())
    assert base["INPUT_ID"].tolist() == [expected(adapters / "plain")]
