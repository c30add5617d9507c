"""Both clients' handling of adapters, against a handler instead of a server. Every test runs on both."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from multilora_client import (
    ENSEMBLE,
    Adapter,
    AdapterConflict,
    AdapterError,
    AdapterNotFound,
    AdapterTensors,
    Alternative,
    AsyncClient,
    AsyncMockTransport,
    CacheFull,
    Chunk,
    Client,
    Door,
    Generation,
    InferRequest,
    InvalidRequest,
    MockTransport,
    MultiloraClientError,
    PromptTokens,
    Response,
    convert_peft,
    load_adapter,
    parse_error,
)
from multilora_client.tensors import flat_values
from multilora_wire.sites import decoder_sites

Handler = Callable[[InferRequest], Iterable[Response]]
NOT_CACHED = "[NOT_FOUND] LoRA task 7 not found in cache. Please send LoRA weights with request (request r)"


class Blocking:
    """Drives Client."""

    def __init__(self, handler: Handler, **options: Any) -> None:
        streams_tensors = options.pop("streams_tensors", True)
        self.client = Client(transport=MockTransport(handler, streams_tensors=streams_tensors), **options)

    def generate(self, *args: Any, **options: Any) -> Generation:
        return self.client.generate(*args, **options)

    def stream(self, *args: Any, **options: Any) -> list[Chunk]:
        return list(self.client.stream(*args, **options))

    def upload(self, adapter: Adapter, **options: Any) -> Generation:
        return self.client.upload(adapter, **options)

    def stop(self, request_id: str) -> None:
        self.client.stop(request_id)


class Asyncio:
    """Drives AsyncClient in the same way."""

    def __init__(self, handler: Handler, **options: Any) -> None:
        streams_tensors = options.pop("streams_tensors", True)
        self.client = AsyncClient(transport=AsyncMockTransport(handler, streams_tensors=streams_tensors), **options)

    def generate(self, *args: Any, **options: Any) -> Generation:
        return asyncio.run(self.client.generate(*args, **options))

    def stream(self, *args: Any, **options: Any) -> list[Chunk]:
        async def collect() -> list[Chunk]:
            return [chunk async for chunk in self.client.stream(*args, **options)]

        return asyncio.run(collect())

    def upload(self, adapter: Adapter, **options: Any) -> Generation:
        return asyncio.run(self.client.upload(adapter, **options))

    def stop(self, request_id: str) -> None:
        asyncio.run(self.client.stop(request_id))


@pytest.fixture(params=[Blocking, Asyncio])
def make_client(request: pytest.FixtureRequest) -> Any:
    return request.param


class Server:
    """Keeps adapters like the real one; `events` says what arrived: upload, weights, id or base."""

    def __init__(self) -> None:
        self.adapters: dict[int, str] = {}
        self.events: list[str] = []
        self.requests: list[InferRequest] = []

    def __call__(self, request: InferRequest) -> Iterable[Response]:
        self.requests.append(request)
        self.events.append(_describe(request))
        if "lora_task_id" not in request.inputs:
            return [Response({"text_output": ["base"]}, is_final=True)]
        (task,) = values(request, "lora_task_id")
        if "lora_weights" in request.inputs:
            self.adapters[task] = str(values(request, "lora_weights"))
        if task not in self.adapters:
            raise parse_error(NOT_CACHED)
        outputs = {"text_output": ["adapted"], "lora_task_id_out": [task], "lora_digest": [self.adapters[task]]}
        return [Response(outputs), Response({"finish_reason": ["stop"]}, is_final=True)]


def _describe(request: InferRequest) -> str:
    if "lora_weights" in request.inputs:
        return "weights" if "text_input" in request.inputs else "upload"
    return "id" if "lora_task_id" in request.inputs else "base"


def values(request: InferRequest, name: str) -> list[Any]:
    tensor = request.inputs[name]
    return list(flat_values(tensor.datatype, tensor.data))


@pytest.fixture
def adapter(small_tensors: AdapterTensors) -> Adapter:
    return Adapter(7, small_tensors)


def generate_text(client: Any, **options: Any) -> str:
    return client.generate("hi", **options).text


def stream_text(client: Any, **options: Any) -> str:
    return "".join(chunk.text for chunk in client.stream("hi", **options))


def generate_prompt(client: Any) -> Generation:
    return client.generate("hi", num_prompt_top_log_probs=2, max_tokens=0)


def stream_prompt(client: Any) -> Chunk:
    return client.stream("hi", num_prompt_top_log_probs=2, max_tokens=0)[0]


both_prompts = pytest.mark.parametrize("ask_for_prompt", [generate_prompt, stream_prompt])
both_ways = pytest.mark.parametrize("ask", [generate_text, stream_text])


SIDES = {"hidden_size": 64, "q_size": 64, "kv_size": 32, "intermediate_size": 96}


class SitesServer(Server):
    """Tells its sites, and its name, as the server's model `adapters` does; or that it has no such model."""

    def __init__(self, tells_sites: bool = True, **sides: int) -> None:
        super().__init__()
        self.sites = decoder_sites(3, **(SIDES | sides))
        self.tells_sites = tells_sites

    def __call__(self, request: InferRequest) -> Iterable[Response]:
        if request.model != "adapters":
            return super().__call__(request)
        (text,) = values(request, "request")
        self.events.append(json.loads(text)["operation"])
        if not self.tells_sites:
            raise parse_error("Request for unknown model: 'adapters' is not found", status="NOT_FOUND")
        layout = {"layout": {"sites": asdict(self.sites), "version": 99}}
        model = {"model": "tiny", "max_model_len": 64, "vocab_size": 512, "version": "1"}
        return [Response({"response": [json.dumps(layout if self.events[-1] == "layout" else model)]})]


@pytest.fixture
def of_another_model(tmp_path: Path) -> Path:
    """A random adapter of a Qwen 3 whose q has 48 inputs and 80 outputs, as many values as one of 64 and 64."""
    config = Qwen3Config(
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=20,
        vocab_size=512,
    )
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    model = get_peft_model(Qwen3ForCausalLM(config), lora)
    model.peft_config["default"].base_model_name_or_path = "acme/qwen"
    model.save_pretrained(tmp_path / "peft")
    return tmp_path / "peft"


def upload(client: Any, **options: Any) -> str:
    return client.upload(**options).text


all_doors = pytest.mark.parametrize("ask", [generate_text, stream_text, upload])
as_folder_or_files = pytest.mark.parametrize("is_converted", [False, True])


def load(directory: Path, is_converted: bool) -> Adapter:
    """The adapter of a folder of PEFT, or of the files that `multilora convert` makes of it."""
    adapter = Adapter(7, convert_peft(directory, "float16"))
    if is_converted:
        adapter.content.save(directory.parent / "converted")
        return load_adapter(directory.parent / "converted", 7)
    return adapter


@all_doors
@as_folder_or_files
@pytest.mark.parametrize("streams_tensors", [True, False])
def test_an_adapter_of_another_model_is_not_sent(
    make_client: Any, of_another_model: Path, ask: Any, is_converted: bool, streams_tensors: bool
) -> None:
    adapter = load(of_another_model, is_converted)
    server = SitesServer()
    with pytest.raises(AdapterError) as caught:
        ask(make_client(server, streams_tensors=streams_tensors), adapter=adapter)
    assert str(caught.value) == (
        "the adapter was made for acme/qwen, not for tiny: model.layers.0.self_attn.q_proj has 48 inputs and 80 "
        "outputs there, 64 inputs and 64 outputs here"
    )
    assert server.events == ["layout", "describe"]


@all_doors
@as_folder_or_files
def test_an_adapter_of_the_servers_model_is_sent(
    make_client: Any, of_another_model: Path, ask: Any, is_converted: bool
) -> None:
    adapter = load(of_another_model, is_converted)
    server = SitesServer(hidden_size=48, q_size=80, kv_size=40)
    client = make_client(server)
    assert [ask(client, adapter=adapter), generate_text(client, adapter=adapter)] == ["adapted"] * 2
    assert server.events == ["layout", "upload" if ask is upload else "weights", "id"]


def test_the_sites_are_asked_for_each_time_that_weights_are_sent(make_client: Any, of_another_model: Path) -> None:
    """A server that has forgotten the adapter may be another one, with another model."""
    adapter = load(of_another_model, is_converted=False)
    server = SitesServer(hidden_size=48, q_size=80, kv_size=40)
    client = make_client(server)
    generate_text(client, adapter=adapter)
    server.adapters.clear()
    server.sites = decoder_sites(3, **SIDES)
    with pytest.raises(AdapterError, match="acme/qwen"):
        generate_text(client, adapter=adapter)
    assert server.events == ["layout", "weights", "id", "layout", "describe"]


def test_a_server_that_cannot_tell_its_sites_gets_the_weights(make_client: Any, of_another_model: Path) -> None:
    """Triton with TensorRT-LLM's backend has no model `adapters`."""
    server = SitesServer(tells_sites=False)
    assert generate_text(make_client(server), adapter=load(of_another_model, is_converted=False)) == "adapted"
    assert server.events == ["layout", "weights"]


def test_an_adapter_of_unknown_origin_is_sent_at_once(make_client: Any, adapter: Adapter) -> None:
    server = SitesServer()
    assert generate_text(make_client(server), adapter=adapter) == "adapted"
    assert server.events == ["weights"]


def test_tools_and_a_guide_travel_with_a_chat(make_client: Any) -> None:
    server = Server()
    messages, tools = [{"role": "user", "content": "Rain?"}], [{"type": "function", "function": {"name": "sky"}}]

    make_client(server).generate(messages=messages, tools=tools, guide_type="regex", guide="yes|no")

    assert json.loads(values(server.requests[0], "messages")[0]) == {"messages": messages, "tools": tools}
    assert values(server.requests[0], "guided_decoding_guide_type") == ["regex"]
    assert values(server.requests[0], "guided_decoding_guide") == ["yes|no"]


def test_how_a_template_is_filled_in_travels_with_a_chat(make_client: Any) -> None:
    server = Server()
    messages = [{"role": "assistant", "content": "It rains"}]
    options = {
        "chat_template_kwargs": {"enable_thinking": False},
        "add_generation_prompt": False,
        "continue_final_message": True,
    }

    make_client(server).generate(messages=messages, **options)

    assert json.loads(values(server.requests[0], "messages")[0]) == {"messages": messages, **options}


@pytest.mark.parametrize(
    "option", [{"tools": [{"type": "function"}]}, {"chat_template_kwargs": {"a": 1}}, {"continue_final_message": True}]
)
@pytest.mark.parametrize("prompt", [{"prompt": "hi"}, {"input_ids": [1]}])
def test_options_of_a_chat_without_messages_are_refused(
    make_client: Any, option: dict[str, Any], prompt: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest, match=f"{next(iter(option))} go with messages only"):
        make_client(Server()).generate(**prompt, **option)


@pytest.mark.parametrize("option", ["lora_task_id", "max_token"])
def test_an_option_that_does_not_exist_is_not_passed_over(make_client: Any, option: str) -> None:
    # The worst of them would be an adapter that nobody notices is missing.
    with pytest.raises(TypeError, match=f"no option {option}"):
        make_client(Server()).generate("hi", **{option: 7})


@both_ways
def test_weights_go_with_the_first_use_and_the_id_alone_with_later_ones(
    make_client: Any, ask: Any, adapter: Adapter
) -> None:
    server = Server()
    client = make_client(server)

    assert [ask(client, adapter=adapter) for _ in range(3)] == ["adapted"] * 3
    assert ask(client) == "base"
    assert server.events == ["weights", "id", "id", "base"]


@both_ways
def test_weights_are_sent_again_when_the_server_has_forgotten_them(
    make_client: Any, ask: Any, adapter: Adapter
) -> None:
    server = Server()
    client = make_client(server)
    ask(client, adapter=adapter)
    server.adapters.clear()

    assert ask(client, adapter=adapter) == "adapted"
    assert server.events == ["weights", "id", "weights"]


@both_ways
def test_weights_are_not_sent_a_second_time_in_vain(make_client: Any, ask: Any, adapter: Adapter) -> None:
    events: list[str] = []

    def refuse(request: InferRequest) -> Iterable[Response]:
        events.append(_describe(request))
        raise parse_error(NOT_CACHED)

    with pytest.raises(AdapterNotFound) as caught:
        ask(make_client(refuse), adapter=adapter)

    assert events == ["weights"]
    assert (caught.value.code, caught.value.request_id) == ("NOT_FOUND", "r")


@both_ways
def test_a_second_refusal_after_a_resend_is_raised(make_client: Any, ask: Any, adapter: Adapter) -> None:
    server = Server()
    events: list[str] = []

    def forget_for_good(request: InferRequest) -> Iterable[Response]:
        events.append(_describe(request))
        if len(events) > 1:
            raise parse_error(NOT_CACHED)
        return server(request)

    client = make_client(forget_for_good)
    ask(client, adapter=adapter)

    with pytest.raises(AdapterNotFound):
        ask(client, adapter=adapter)
    assert events == ["weights", "id", "weights"]


@both_ways
def test_an_id_without_weights_is_asked_once(make_client: Any, ask: Any) -> None:
    server = Server()

    with pytest.raises(AdapterNotFound):
        ask(make_client(server), adapter=7)
    assert server.events == ["id"]


@both_ways
def test_an_attempt_that_failed_does_not_count_as_sent(make_client: Any, ask: Any, adapter: Adapter) -> None:
    server = Server()
    is_full = True

    def full_at_first(request: InferRequest) -> Iterable[Response]:
        if is_full:
            raise parse_error("[UNAVAILABLE] Cache is full. There are no done tasks to evict (request r)")
        return server(request)

    client = make_client(full_at_first)
    with pytest.raises(CacheFull) as caught:
        ask(client, adapter=adapter)
    is_full = False
    ask(client, adapter=adapter)

    assert caught.value.retryable
    assert server.events == ["weights"]


def test_other_weights_under_the_same_id_are_sent_so_that_the_server_can_object(
    make_client: Any, adapter: Adapter, small_tensors: AdapterTensors
) -> None:
    server = Server()
    client = make_client(server)
    client.generate("hi", adapter=adapter)
    other = AdapterTensors(small_tensors.weights + np.float16(1), small_tensors.config, "FP16")

    client.generate("hi", adapter=Adapter(7, other))

    assert server.events == ["weights", "weights"]


def test_an_equal_adapter_loaded_twice_is_sent_once(
    make_client: Any, adapter: Adapter, small_tensors: AdapterTensors
) -> None:
    server = Server()
    client = make_client(server)
    client.generate("hi", adapter=adapter)

    client.generate(
        "hi", adapter=Adapter(7, AdapterTensors(small_tensors.weights.copy(), adapter.content.config, "FP16"))
    )

    assert server.events == ["weights", "id"]


@both_ways
def test_an_answer_by_weights_that_someone_else_put_there_is_an_error(
    make_client: Any, ask: Any, adapter: Adapter
) -> None:
    server = Server()
    client = make_client(server)
    ask(client, adapter=adapter)
    server.adapters[7] = "other weights"

    with pytest.raises(AdapterConflict, match="LoRA task 7 was replaced"):
        ask(client, adapter=adapter)


@both_ways
def test_an_answer_by_another_adapter_is_an_error(make_client: Any, ask: Any) -> None:
    client = make_client(lambda _: [Response({"text_output": ["?"], "lora_task_id_out": [8]}, is_final=True)])

    with pytest.raises(AdapterConflict, match="LoRA task 7 was asked for and 8 answered"):
        ask(client, adapter=7)


@both_ways
def test_an_answer_by_the_base_model_instead_is_an_error(make_client: Any, ask: Any) -> None:
    client = make_client(lambda _: [Response({"lora_task_id_out": [0], "lora_digest": [""]}, is_final=True)])

    with pytest.raises(AdapterConflict, match="LoRA task 7 was asked for and 0 answered"):
        ask(client, adapter=7)


def test_the_base_model_signs_with_no_adapter(make_client: Any) -> None:
    client = make_client(lambda _: [Response({"lora_task_id_out": [0], "lora_digest": [""]})])

    assert client.generate("hi").lora_task_id is None


@both_ways
def test_a_refusal_for_other_weights_reaches_the_caller(make_client: Any, ask: Any, adapter: Adapter) -> None:
    def refuse(_: InferRequest) -> Iterable[Response]:
        raise parse_error(
            "in ensemble 'ensemble', [ALREADY_EXISTS] LoRA task 7 is cached with other weights (request r)"
        )

    with pytest.raises(AdapterConflict, match=r"^LoRA task 7 is cached with other weights$"):
        ask(make_client(refuse), adapter=adapter)


def test_a_stream_that_cannot_carry_weights_uploads_them_first(make_client: Any, adapter: Adapter) -> None:
    server = Server()
    client = make_client(server, streams_tensors=False)
    stream_text(client, adapter=adapter)
    stream_text(client, adapter=adapter)
    server.adapters.clear()
    stream_text(client, adapter=adapter)

    assert server.events == ["upload", "id", "id", "id", "upload", "id"]
    assert {request.model for request in server.requests if _describe(request) == "upload"} == {"generation_unary"}


def test_an_answer_that_has_begun_is_not_begun_again(make_client: Any, adapter: Adapter) -> None:
    def break_off(request: InferRequest) -> Iterable[Response]:
        yield Response({"text_output": ["half"]})
        raise parse_error(NOT_CACHED)

    client = make_client(break_off)
    with pytest.raises(AdapterNotFound):
        client.stream("hi", adapter=adapter)


def test_a_trace_goes_beside_the_tensors_and_a_malformed_one_is_refused(make_client: Any) -> None:
    server = Server()
    client = make_client(server)
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    client.generate("hi", traceparent=traceparent)
    client.stream("hi", traceparent=traceparent)
    client.generate("hi")
    assert [request.headers.get("traceparent") for request in server.requests] == [traceparent, traceparent, None]
    with pytest.raises(InvalidRequest, match="traceparent"):
        client.generate("hi", traceparent="00-1\r\n")


def test_an_upload_waits_as_long_as_it_is_told_to_or_as_the_stream_it_is_for(
    make_client: Any, adapter: Adapter
) -> None:
    server = Server()
    client = make_client(server, streams_tensors=False)
    client.upload(adapter, timeout_s=3.0)
    client.stream("hi", adapter=replace(adapter, lora_task_id=8), timeout_s=4.0)
    assert [request.timeout_s for request in server.requests] == [3.0, 4.0, 4.0]


def test_an_upload_always_sends_and_later_requests_need_only_the_id(make_client: Any, adapter: Adapter) -> None:
    server = Server()
    client = make_client(server)

    assert client.upload(adapter).lora_digest == client.upload(adapter).lora_digest != ""
    client.generate("hi", adapter=adapter)

    assert server.events == ["upload", "upload", "id"]


def test_the_fields_of_an_answer_are_those_of_the_response(make_client: Any) -> None:
    outputs = {
        "text_output": ["Ahoy"],
        "output_ids": [4, 9, 0, 0],
        "sequence_length": [2],
        "finish_reason": ["length"],
        "num_input_tokens": [3],
        "num_output_tokens_so_far": [2],
        "lora_task_id_out": [7],
        "lora_digest": ["ab"],
    }

    answer = make_client(lambda _: [Response(outputs)]).generate("hi", adapter=7, request_id="mine")

    alternatives = [Alternative("Ahoy", [4, 9], "length", num_output_tokens=2)]
    assert answer == Generation("Ahoy", [4, 9], "length", 3, 2, 7, "ab", "mine", alternatives=alternatives)


def test_beams_log_probs_and_logits_are_told_for_each_answer(make_client: Any) -> None:
    outputs = {
        "text_output": ["Ahoy", "Hi"],
        "output_ids": [4, 9, 5, 0],
        "sequence_length": [2, 1],
        "finish_reason": ["length", "stop"],
        "num_input_tokens": [1],
        "cum_log_probs": np.array([-0.75, -2.0], np.float32),
        "output_log_probs": np.array([-0.5, -0.25, -2.0, 0.0], np.float32),
        "top_log_prob_ids": [4, 7, 9, 8, 6, 5, 0, 0],
        "top_log_probs": np.array([-0.5, -1.0, -0.25, -3.0, -1.0, -2.0, 0.0, 0.0], np.float32),
        "context_logits": np.arange(3, dtype=np.float32),
        "generation_logits": np.arange(12, dtype=np.float32),
    }

    answer = make_client(lambda _: [Response(outputs)]).generate("hi", beam_width=2)

    first = Alternative(
        "Ahoy", [4, 9], "length", [-0.5, -0.25], [[(4, -0.5), (7, -1.0)], [(9, -0.25), (8, -3.0)]], -0.75
    )
    second = Alternative("Hi", [5], "stop", [-2.0], [[(6, -1.0), (5, -2.0)]], -2.0)
    assert answer.alternatives == [first, second]
    assert (answer.text, answer.log_probs, answer.cum_log_prob) == ("Ahoy", [-0.5, -0.25], -0.75)
    assert answer.context_logits.tolist() == [[0, 1, 2]]
    logits = [alternative.generation_logits.tolist() for alternative in answer.alternatives]
    assert logits == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8]]]


def test_beams_are_not_streamed(make_client: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"beam_width is \d+: a stream has one beam"):
        make_client(lambda _: []).stream("hi", beam_width=2)


def piece(sequence_index: int, text: str, finish_reason: str = "") -> Response:
    return Response({"text_output": [text], "sequence_index": [sequence_index], "finish_reason": [finish_reason]})


def test_the_chunks_of_several_answers_say_which_they_are_part_of(make_client: Any) -> None:
    responses = [piece(1, "b"), piece(0, "a", "stop"), piece(1, "bb"), piece(1, "", "length"), piece(2, "c", "stop")]

    chunks = make_client(lambda _: responses).stream("hi", num_return_sequences=3)

    assert [(chunk.sequence_index, chunk.text) for chunk in chunks] == [
        (1, "b"),
        (0, "a"),
        (1, "bb"),
        (1, ""),
        (2, "c"),
    ]
    assert [chunk.is_final for chunk in chunks] == [False, False, False, False, True]


@both_prompts
def test_a_prompt_is_told_token_by_token(make_client: Any, ask_for_prompt: Any) -> None:
    outputs = {
        "prompt_ids": [1, 40, 2],
        "prompt_log_probs": np.array([0.0, -0.5, -2.0], np.float32),
        "prompt_top_log_prob_ids": [-1, -1, 40, 2, 41, 2],
        "prompt_top_log_probs": np.array([0.0, 0.0, -0.5, -1.0, -0.25, -2.0], np.float32),
        "prompt_tokens": ["<s>", "", "", "\xc3", "\xc3", "</s>", "</s>", "é", "</s>"],
        "num_cached_tokens": [2],
    }

    answer = ask_for_prompt(make_client(lambda _: [Response(outputs, is_final=True)]))

    assert answer.prompt == PromptTokens(
        token_ids=[1, 40, 2],
        tokens=[[b"<s>"], [b"\xc3", b"\xc3", b"</s>"], [b"</s>", b"\xe9", b"</s>"]],
        log_probs=[0.0, -0.5, -2.0],
        top_log_probs=[[], [(40, -0.5), (2, -1.0)], [(41, -0.25), (2, -2.0)]],
    )
    assert answer.num_cached_tokens == 2


def test_an_answer_has_no_prompt_that_nobody_asked_for(make_client: Any) -> None:
    assert make_client(lambda _: [piece(0, "a", "stop")]).generate("hi").prompt is None


def test_a_chunk_is_final_by_its_flag_or_by_its_finish_reason(make_client: Any) -> None:
    responses = [Response({"text_output": ["a"]}), Response({"finish_reason": ["stop"]}), Response({}, is_final=True)]

    chunks = make_client(lambda _: responses).stream("hi")

    assert [(chunk.text, chunk.is_final, chunk.finish_reason) for chunk in chunks] == [
        ("a", False, None),
        ("", True, "stop"),
        ("", True, None),
    ]


def sent_inputs(make_client: Any, *args: Any, **options: Any) -> dict[str, Any]:
    server = Server()
    make_client(server, **({"door": options.pop("door")} if "door" in options else {})).generate(*args, **options)
    request = server.requests[0]
    return {name: (tensor.datatype, tensor.shape, values(request, name)) for name, tensor in request.inputs.items()}


def test_options_become_the_tensors_of_the_protocol(make_client: Any) -> None:
    inputs = sent_inputs(
        make_client,
        "naïve",
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_k=40,
        top_p=0.25,
        seed=2**64 - 1,
        stop_words=["\n", "fin"],
        end_id=-1,
    )

    flags = ("exclude_input_in_output", "return_num_input_tokens", "return_num_output_tokens")
    assert inputs == {
        "text_input": ("BYTES", (1, 1), ["naïve"]),
        "max_tokens": ("INT32", (1, 1), [9]),
        "min_tokens": ("INT32", (1, 1), [2]),
        "temperature": ("FP32", (1, 1), [0.5]),
        "runtime_top_k": ("INT32", (1, 1), [40]),
        "runtime_top_p": ("FP32", (1, 1), [0.25]),
        "seed": ("UINT64", (1, 1), [2**64 - 1]),
        "stop_words": ("BYTES", (1, 2), ["\n", "fin"]),
        "end_id": ("INT32", (1, 1), [-1]),
        "streaming": ("BOOL", (1, 1), [False]),
    } | {flag: ("BOOL", (1, 1), [True]) for flag in flags}


def test_penalties_beams_and_what_is_told_of_tokens_are_options(make_client: Any) -> None:
    numbers = {"min_p": 0.25, "repetition_penalty": 1.5, "presence_penalty": -0.5, "frequency_penalty": 0.5}
    numbers |= {"length_penalty": 2.0, "beam_search_diversity_rate": -1.0}
    counts = {"num_return_sequences": 2, "beam_width": 3, "num_top_log_probs": 4}
    flags = ("early_stopping", "return_log_probs", "return_context_logits", "return_generation_logits")
    words = ["bad", "worse"]

    inputs = sent_inputs(make_client, "hi", **numbers, **counts, **dict.fromkeys(flags, True), bad_words=words)

    sent = {"len_penalty" if name == "length_penalty" else name: value for name, value in numbers.items()}
    assert {name: inputs[name] for name in sent} == {name: ("FP32", (1, 1), [v]) for name, v in sent.items()}
    assert {name: inputs[name] for name in counts} == {name: ("INT32", (1, 1), [n]) for name, n in counts.items()}
    assert {name: inputs[name] for name in flags} == dict.fromkeys(flags, ("BOOL", (1, 1), [True]))
    assert inputs["bad_words"] == ("BYTES", (1, 2), words)
    assert sent_inputs(make_client, "hi", door=ENSEMBLE, length_penalty=2.0)["length_penalty"][2] == [2.0]


def test_what_is_told_of_prompts_and_where_answers_end_are_options(make_client: Any) -> None:
    counts = {
        "num_prompt_top_log_probs": 2,
        "truncate_prompt_tokens": -1,
        "priority": -3,
        "max_tokens": 0,
        "lora_start": 7,
    }
    flags = ("return_prompt_log_probs", "include_stop_str_in_output")

    inputs = sent_inputs(make_client, "hi", **counts, **dict.fromkeys(flags, True), stop_token_ids=[40, 2])

    assert {name: inputs[name] for name in counts} == {name: ("INT32", (1, 1), [n]) for name, n in counts.items()}
    assert {name: inputs[name] for name in flags} == dict.fromkeys(flags, ("BOOL", (1, 1), [True]))
    # Two sequences of a token each: the first ends after one token of them all, the second after two.
    assert inputs["stop_words_list"] == ("INT32", (1, 2, 2), [40, 2, 1, 2])


def test_the_digest_that_a_version_must_have_is_an_input(make_client: Any, adapter: Adapter) -> None:
    inputs = sent_inputs(make_client, "hi", lora_name="pirate", lora_expected_digest="ab" * 16)
    assert inputs["lora_expected_digest"] == ("BYTES", (1, 1), ["ab" * 16])
    server = Server()
    make_client(server).upload(adapter, expected_digest="cd" * 16)
    make_client(server).upload(adapter)
    assert values(server.requests[0], "lora_expected_digest") == ["cd" * 16]
    assert "lora_expected_digest" not in server.requests[1].inputs


def test_the_beginning_of_an_answer_is_an_option(make_client: Any) -> None:
    by_text = sent_inputs(make_client, "hi", decoder_text_input="Es war")
    by_ids = sent_inputs(make_client, input_ids=[5], decoder_input_ids=[2, 8, 9])
    assert by_text["decoder_text_input"] == ("BYTES", (1, 1), ["Es war"])
    assert by_ids["decoder_input_ids"] == ("INT32", (1, 3), [2, 8, 9])
    assert by_ids["decoder_input_lengths"] == ("INT32", (1, 1), [3])
    assert not {name for name in sent_inputs(make_client, "hi") if "decoder" in name}


def test_logits_of_a_beginning_are_as_many_as_its_tokens_whatever_the_source(make_client: Any) -> None:
    outputs = {"text_output": ["x"], "num_input_tokens": [4], "context_logits": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]}
    response = Response(outputs, shapes={"context_logits": [1, 2, 3]})
    answer = make_client(lambda _: [response]).generate("hi")
    assert answer.context_logits.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


def test_weights_do_not_go_before_a_stream_that_demands_a_version(make_client: Any, adapter: Adapter) -> None:
    server = Server()
    client = make_client(server, streams_tensors=False)
    with pytest.raises(InvalidRequest, match="upload the adapter first, or use gRPC"):
        client.stream("hi", adapter=adapter, lora_expected_digest="ab" * 16)
    assert server.requests == []


def test_token_ids_and_messages_are_prompts_too(make_client: Any) -> None:
    messages = [{"role": "user", "content": "¿qué?"}]

    by_ids = sent_inputs(make_client, input_ids=[5, 6, 7])
    by_messages = sent_inputs(make_client, messages=messages)

    assert by_ids["input_ids"] == ("INT32", (1, 3), [5, 6, 7])
    assert by_ids["input_lengths"] == ("INT32", (1, 1), [3])
    assert json.loads(by_messages["messages"][2][0]) == messages
    assert "text_input" not in by_ids
    assert "text_input" not in by_messages


def test_the_ensemble_has_its_own_names(make_client: Any) -> None:
    inputs = sent_inputs(make_client, "hi", door=ENSEMBLE, top_k=4, top_p=0.5)

    assert (inputs["top_k"][2], inputs["top_p"][2], inputs["stream"][2]) == ([4], [0.5], [False])
    assert not inputs.keys() & {"runtime_top_k", "runtime_top_p", "streaming"}


def test_any_temperature_asks_for_sampling(make_client: Any) -> None:
    inputs = sent_inputs(make_client, "hi", temperature=1.0)
    assert (inputs["temperature"][2], inputs["runtime_top_k"][2]) == ([1.0], [0])
    inputs = sent_inputs(make_client, "hi", temperature=1.0, top_p=0.5)
    assert "runtime_top_k" not in inputs


def test_each_kind_of_request_goes_to_its_model(make_client: Any, adapter: Adapter) -> None:
    server = Server()
    client = make_client(server, door=Door("s", "u", stop_model="halt", upload_model="put"))

    client.generate("hi")
    client.stream("hi")
    client.upload(adapter)
    client.stop("r1")

    assert [request.model for request in server.requests] == ["u", "s", "put", "halt"]
    assert server.requests[3].request_id == "r1"
    assert values(server.requests[3], "stop") == [True]


@pytest.mark.parametrize("prompts", [{}, {"input_ids": [1], "messages": []}, {"prompt": "hi", "input_ids": [1]}])
def test_exactly_one_prompt_is_required(make_client: Any, prompts: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="exactly one of prompt, messages and input_ids"):
        make_client(Server()).generate(**prompts)


@pytest.mark.parametrize(
    "option", [{"seed": -1}, {"seed": 2**64}, {"max_tokens": 2**31}, {"top_k": "many"}, {"end_id": 2**40}]
)
def test_numbers_that_no_tensor_can_hold_are_refused_before_they_are_sent(
    make_client: Any, option: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(option))):
        make_client(Server()).generate("hi", **option)


@pytest.mark.parametrize("lora_task_id", [-1, 2**64])
def test_a_task_id_that_no_tensor_can_hold_is_refused_too(make_client: Any, lora_task_id: int) -> None:
    with pytest.raises(InvalidRequest, match="lora_task_id"):
        make_client(Server()).generate("hi", adapter=lora_task_id)


@pytest.mark.parametrize("option", [{"prompt": "\ud800"}, {"prompt": "hi", "stop_words": ["\udc80"]}])
def test_text_that_is_not_unicode_is_refused(make_client: Any, option: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=f"{list(option)[-1]} is not Unicode text"):
        make_client(Server()).generate(**option)


@pytest.mark.parametrize("url", ["localhost", "localhost:x", "user@localhost:8001", "ftp://localhost", "grpc://", ""])
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_url_that_is_neither_known_nor_host_and_port_is_refused(kind: Any, url: str) -> None:
    with pytest.raises(InvalidRequest, match="write grpc://host:8001, host:8001 or http://host:8000"):
        kind(url)


def test_threads_share_one_client(adapter: Adapter) -> None:
    """Every thread gets its own adapter's answers; an adapter is sent once, or once per thread when they race."""
    server = Server()
    client = Client(transport=MockTransport(server))
    adapters = [Adapter(task, adapter.content) for task in range(4)]
    failures: list[object] = []

    def use_all() -> None:
        for _ in range(50):
            for each in adapters:
                answer = client.generate("hi", adapter=each)
                if answer.lora_task_id != each.lora_task_id:
                    failures.append(answer)

    threads = [threading.Thread(target=use_all) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not failures
    assert len(server.events) == 8 * 50 * 4
    assert 4 <= server.events.count("weights") <= 4 * 8


def test_every_error_of_a_request_has_the_common_base(make_client: Any) -> None:
    with pytest.raises(MultiloraClientError):
        make_client(Server()).generate("hi", adapter=9)
