"""The answers of a batch in which one request goes wrong."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.fake_engine import INFO
from support.fake_triton import FakeRequest, answer_of
from support.fronts import TIMEOUT_S
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from multilora_engine.engine_info import EngineInfo, SourceFacts
from multilora_engine.errors import InvalidRequest, Unauthenticated, Unsupported
from multilora_engine.request import Sender
from multilora_engine.serving.front import EngineLink
from multilora_engine.serving.immediate_model import (
    ImmediateModel,
    PostprocessingModel,
    PreprocessingModel,
    decode,
    preprocess,
)
from multilora_engine.serving.inputs import InputTensors
from multilora_engine.serving.ordered_jobs import LONG_REQUEST_BYTES, OrderedJobs
from multilora_engine.serving.senders import Rights
from multilora_engine.text.tokenizer import Tokenizer


class EchoModel(ImmediateModel):
    """Answers with its input, or has a bug."""

    def answer(self, inputs: InputTensors, link: EngineLink) -> dict[str, NDArray[Any]]:
        text = inputs.text("IN", row=0)
        if text == "bug":
            raise RuntimeError("nobody thought of that")
        return {"OUT": np.array([[text]], object)}


class Client:
    """Its tasks run at once."""

    def call_soon(self, task: Callable[[], None]) -> None:
        task()


@dataclass
class OpenLink:
    """Everybody may ask."""

    client: Client = field(default_factory=Client)

    def rights(self, request: FakeRequest) -> Rights:
        return Rights(Sender(), min_priority=0)


class ClosedLink(OpenLink):
    """Nobody may."""

    def rights(self, request: FakeRequest) -> Rights:
        raise Unauthenticated


@pytest.fixture
def started() -> Iterator[Callable[[ImmediateModel, OpenLink], ImmediateModel]]:
    """Gives a model its link, and ends the threads of it."""
    with ExitStack() as stack:

        def start(model: ImmediateModel, link: OpenLink) -> ImmediateModel:
            vars(model).update(_link=link, _jobs=OrderedJobs(1, "test"))
            stack.callback(vars(model)["_jobs"].close)
            return model

        yield start


def asked(model: ImmediateModel, **more: Any) -> FakeRequest:
    request = FakeRequest(output_names=("OUT",), **more)
    model.execute([request])
    return request


def test_a_request_without_rights_is_not_looked_at(started: Any) -> None:
    model = started(EchoModel(), ClosedLink())
    (refused,) = asked(model, tensors={"IN": [["bug"]]}, id="ab12").sender.wait()
    assert refused.error is not None
    assert refused.error.code == "INVALID_ARG"
    assert refused.error.message.startswith("[UNAUTHENTICATED] no valid API key")


def test_a_bug_fails_its_own_request_with_a_code_and_the_others_are_answered(started: Any) -> None:
    model = started(EchoModel(), OpenLink())
    requests = [FakeRequest({"IN": [[text]]}, id=text, output_names=("OUT",)) for text in ("first", "bug", "last")]
    model.execute(requests)
    (first,), (failed,), (last,) = (request.sender.wait() for request in requests)
    assert [response.arrays["OUT"].item() for response in (first, last)] == ["first", "last"]
    assert failed.error is not None
    assert failed.error.code == "INTERNAL"
    assert failed.error.message == "[INTERNAL] RuntimeError: nobody thought of that (request bug)"


def test_a_short_request_is_answered_while_a_long_one_is_read(started: Any) -> None:
    may_end = threading.Event()

    class SlowModel(EchoModel):
        def answer(self, inputs: InputTensors, link: EngineLink) -> dict[str, NDArray[Any]]:
            if inputs.num_bytes > LONG_REQUEST_BYTES:
                assert may_end.wait(TIMEOUT_S)
            return super().answer(inputs, link)

    model = started(SlowModel(), OpenLink())
    long = asked(model, tensors={"IN": [["x" * (LONG_REQUEST_BYTES + 1)]]})
    (short,) = asked(model, tensors={"IN": [["hi"]]}).sender.wait()
    assert (short.arrays["OUT"].item(), long.sender.responses) == ("hi", [])
    may_end.set()
    (answered,) = long.sender.wait()
    assert len(answered.arrays["OUT"].item()) == LONG_REQUEST_BYTES + 1


@dataclass
class DescribedLink:
    """An engine's link that knows its tokenizer."""

    tokenizer: Tokenizer

    def rights(self, request: FakeRequest) -> Rights:
        return Rights(Sender(), min_priority=0)

    def describe(self) -> tuple[EngineInfo, Tokenizer]:
        return INFO, self.tokenizer


def tokens_batch(tokenizer: Tokenizer, texts: list[list[str]]) -> tuple[np.ndarray, np.ndarray]:
    rows = [[tokenizer.encode(text, add_special_tokens=False) for text in beams] for beams in texts]
    lengths = np.array([[len(beam) for beam in beams] for beams in rows], np.int32)
    tokens = np.full((*lengths.shape, lengths.max() + 2), 7, np.int32)
    for index in np.ndindex(*lengths.shape):
        tokens[index][: lengths[index]] = rows[index[0]][index[1]]
    return tokens, lengths


def test_each_beam_of_each_row_is_decoded_to_its_own_length(tokenizer: Tokenizer) -> None:
    texts = [["Grüße", "", "a b  c"], ["\n\n", "日本語", "x"]]
    tokens, lengths = tokens_batch(tokenizer, texts)
    tensors = InputTensors(FakeRequest({"TOKENS_BATCH": tokens, "SEQUENCE_LENGTH": lengths}))
    assert [[text.decode() for text in row] for row in decode(tensors, INFO, tokenizer)] == texts


@pytest.mark.parametrize(
    ("shape", "lengths"), [((1, 1, 3), [[4]]), ((1, 1, 3), [[-1]]), ((1, 2, 3), [[1]]), ((1, 3), [[1]])]
)
def test_lengths_that_do_not_fit_are_refused(tokenizer: Tokenizer, shape: tuple[int, ...], lengths: Any) -> None:
    tensors = {"TOKENS_BATCH": np.zeros(shape, np.int32), "SEQUENCE_LENGTH": np.array(lengths, np.int32)}
    with pytest.raises(InvalidRequest, match="does not fit TOKENS_BATCH"):
        decode(InputTensors(FakeRequest(tensors)), INFO, tokenizer)


def test_the_texts_of_all_rows_and_beams_have_one_dimension(tokenizer: Tokenizer) -> None:
    tokens, lengths = tokens_batch(tokenizer, [["a", "b"], ["c", "d"]])
    request = FakeRequest({"TOKENS_BATCH": tokens, "SEQUENCE_LENGTH": lengths}, output_names=("OUTPUT",))
    response = answer_of(PostprocessingModel(), DescribedLink(tokenizer), request)
    assert response.arrays["OUTPUT"].tolist() == [b"a", b"b", b"c", b"d"]


def run(tokenizer: Tokenizer, tensors: dict[str, Any], info: EngineInfo = INFO) -> dict[str, Any]:
    arrays = preprocess(InputTensors(FakeRequest(tensors)), info, tokenizer)
    dtypes = {name: array.dtype for name, array in arrays.items()}
    assert (dtypes.pop("EMBEDDING_BIAS"), dtypes.pop("OUT_PROMPT_TABLE_EXTRA_IDS")) == (np.float32, np.uint64)
    assert set(dtypes.values()) == {np.dtype(np.int32)}
    return {name: array.tolist() for name, array in arrays.items()}


def test_texts_become_padded_rows_with_their_lengths(tokenizer: Tokenizer) -> None:
    short, long = (tokenizer.encode(text, add_special_tokens=True) for text in ("Hi", "Once upon a time"))
    arrays = run(tokenizer, {"QUERY": [["Hi"], ["Once upon a time"]], "REQUEST_OUTPUT_LEN": [[3], [4]]})
    assert [row[:n] for row, [n] in zip(arrays["INPUT_ID"], arrays["REQUEST_INPUT_LEN"], strict=True)] == [short, long]
    assert len(arrays["INPUT_ID"][0]) == len(long)
    assert arrays["REQUEST_OUTPUT_LEN"] == [[3], [4]]


def test_a_chat_becomes_tokens(tokenizer: Tokenizer) -> None:
    arrays = run(tokenizer, {"MESSAGES": [['[{"role": "user", "content": "Say hi"}]']]})
    assert arrays["INPUT_ID"] == [tokenizer.apply_chat_template([{"role": "user", "content": "Say hi"}])]
    assert "REQUEST_OUTPUT_LEN" not in arrays


@pytest.mark.parametrize(
    ("default", "asked", "is_added"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"ADD_SPECIAL_TOKENS": [[False]]}, False),
        (False, {"ADD_SPECIAL_TOKENS": [[True]]}, True),
    ],
)
def test_special_tokens_are_added_by_default_or_as_asked(
    default_model_dir: Path, tmp_path: Path, default: bool, asked: dict[str, Any], is_added: bool
) -> None:
    tokenizer, special_id = surrounding_tokenizer(default_model_dir, tmp_path)
    info = dataclasses.replace(INFO, add_special_tokens=default)
    inputs = InputTensors(FakeRequest({"QUERY": [["Hi"]], **asked}))
    plain = tokenizer.encode("Hi", add_special_tokens=False)
    assert preprocess(inputs, info, tokenizer)["INPUT_ID"].tolist() == [[special_id] * is_added + plain]


@pytest.mark.parametrize("keeps_special", [True, False])
@pytest.mark.parametrize("default", [True, False])
def test_a_chat_gets_special_tokens_only_where_it_asks(
    default_model_dir: Path, tmp_path: Path, keeps_special: bool, default: bool
) -> None:
    tokenizer, special_id = surrounding_tokenizer(default_model_dir, tmp_path)
    info = dataclasses.replace(INFO, add_special_tokens=default, special_tokens_in_messages=keeps_special)
    messages = {"MESSAGES": [['[{"role": "user", "content": "a <|im_end|> b"}]']]}

    def ids(**asked: Any) -> Any:
        return preprocess(InputTensors(FakeRequest(messages | asked)), info, tokenizer)["INPUT_ID"].tolist()[0]

    assert ids() == ids(ADD_SPECIAL_TOKENS=[[False]])
    assert ids(ADD_SPECIAL_TOKENS=[[True]]) == [special_id, *ids()]


def surrounding_tokenizer(default_model_dir: Path, tmp_path: Path) -> tuple[Tokenizer, int]:
    """A tokenizer that puts a special token in front of a text, and the token."""
    original = AutoTokenizer.from_pretrained(default_model_dir)
    special = "<|im_start|>"
    original.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{special} $A", special_tokens=[(special, special_id := original.convert_tokens_to_ids(special))]
    )
    original.save_pretrained(tmp_path)
    return Tokenizer(tmp_path), special_id


def test_end_and_pad_id_are_the_tokenizers_unless_given(tokenizer: Tokenizer) -> None:
    arrays = run(tokenizer, {"QUERY": [["Hi"]]})
    assert (arrays["OUT_END_ID"], arrays["OUT_PAD_ID"]) == ([[tokenizer.eos_id]], [[tokenizer.pad_id]])
    arrays = run(tokenizer, {"QUERY": [["Hi"]], "END_ID": [[-1]], "PAD_ID": [[0]]})
    assert (arrays["OUT_END_ID"], arrays["OUT_PAD_ID"]) == ([[-1]], [[0]])


def test_words_become_ids_and_ends_and_biases_in_upstreams_form(tokenizer: Tokenizer) -> None:
    (cat,), dog, sea = (tokenizer.encode(word, add_special_tokens=False) for word in (" cat", " doggerel", "the sea"))
    words = {"BAD_WORDS_DICT": [[" cat", " doggerel"], [" cat", ""]], "STOP_WORDS_DICT": [["the sea"], ["the sea"]]}
    bias = {"EMBEDDING_BIAS_WORDS": [[" cat"], [" doggerel"]]}
    bias |= {"EMBEDDING_BIAS_WEIGHTS": np.array([[1.5], [-2.0]], np.float32)}
    arrays = run(tokenizer, {"QUERY": [["Hi"], ["Ho"]], **words, **bias})
    assert arrays["BAD_WORDS_IDS"] == [
        [[cat, *dog], [1, 1 + len(dog), *[-1] * (len(dog) - 1)]],
        [[cat, *[0] * len(dog)], [1, *[-1] * len(dog)]],
    ]
    assert arrays["STOP_WORDS_IDS"] == [[sea, [len(sea), *[-1] * (len(sea) - 1)]]] * 2
    expected = np.zeros((2, tokenizer.vocab_size), np.float32)
    expected[0, cat] = 1.5
    expected[1, dog] = -2.0
    assert arrays["EMBEDDING_BIAS"] == expected.tolist()


def test_without_words_their_outputs_are_empty_and_so_is_what_only_encoders_have(tokenizer: Tokenizer) -> None:
    arrays = run(tokenizer, {"QUERY": [["Hi"]]})
    assert arrays["BAD_WORDS_IDS"] == arrays["STOP_WORDS_IDS"] == [[[], []]]
    assert arrays["EMBEDDING_BIAS"] == [[]]
    assert (arrays["DECODER_INPUT_ID"], arrays["REQUEST_DECODER_INPUT_LEN"]) == (arrays["OUT_PAD_ID"], [[1]])


SOURCE_INFO = dataclasses.replace(
    INFO,
    source=SourceFacts(
        max_tokens=40, decoder_start_token_id=4, forced_first_token_id=None, forced_last_token_id=None, pad_token_id=3
    ),
)


def test_a_text_that_begins_the_answer_follows_the_decoders_start_token(tokenizer: Tokenizer) -> None:
    tensors = {"QUERY": [["Hi"], ["Yo"], ["a"]], "DECODER_QUERY": [["Once upon a time"], [""], ["Es"]]}
    arrays = run(tokenizer, {**tensors, "PAD_ID": [[9]] * 3}, SOURCE_INFO)
    rows = zip(arrays["DECODER_INPUT_ID"], arrays["REQUEST_DECODER_INPUT_LEN"], strict=True)
    long, short = ([4, *tokenizer.encode(text, add_special_tokens=False)] for text in ("Once upon a time", "Es"))
    assert [row[:length] for row, [length] in rows] == [long, [3], short]
    # The model's own pad token means that nothing is given, whatever the tokenizer's or the request's is.
    assert run(tokenizer, {"QUERY": [["Hi"]]}, SOURCE_INFO)["DECODER_INPUT_ID"] == [[3]]
    with pytest.raises(InvalidRequest, match="no chats"):
        run(tokenizer, {"MESSAGES": [["[]"]]}, SOURCE_INFO)


@pytest.mark.parametrize(
    "tensors",
    [{"DECODER_QUERY": [["x"]]}, {"IMAGE_BYTES": np.zeros((1, 1, 2, 2, 3), np.uint8)}, {"IMAGES": [["", "x"]]}],
)
def test_what_only_other_models_take_is_unsupported(tokenizer: Tokenizer, tensors: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match=next(iter(tensors))):
        run(tokenizer, {"QUERY": [["Hi"]], **tensors})


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "either text_input or messages; it has neither"),
        ({"QUERY": [["a"]], "MESSAGES": [["[]"]]}, "it has both"),
        ({"QUERY": [[""]]}, "empty prompt"),
        ({"MESSAGES": [["hello"]]}, "JSON list"),
        ({"QUERY": np.array([[b"\xff"]], object)}, "not valid UTF-8"),
    ],
)
def test_what_is_no_prompt_is_refused(tokenizer: Tokenizer, tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        run(tokenizer, tensors)


def test_the_model_answers_each_request_by_outputs_or_by_error(tokenizer: Tokenizer) -> None:
    class Link:
        def rights(self, request: FakeRequest) -> Rights:
            return Rights(Sender(), min_priority=0)

        def describe(self) -> tuple[Any, Tokenizer]:
            return dataclasses.replace(INFO, add_special_tokens=False), tokenizer

    good = FakeRequest({"QUERY": [["Hi"]]}, output_names=("INPUT_ID",))
    bad = FakeRequest({}, id="ab12", output_names=("INPUT_ID",))
    answered, refused = (answer_of(PreprocessingModel(), Link(), request) for request in (good, bad))
    assert {name: array.tolist() for name, array in answered.arrays.items()} == {
        "INPUT_ID": [tokenizer.encode("Hi", add_special_tokens=False)]
    }
    assert refused.error is not None
    assert refused.error.code == "INVALID_ARG"
    assert refused.error.message.endswith("(request ab12)")
