"""The header of a safetensors file is believed where it adds up; any other file is an error with names and numbers."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save

from multilora_wire.tensor_file import FileBytes, MemoryBytes, TensorFileError, read_tensor_places

DATA = bytes(range(24))
SOUND: dict[str, Any] = {
    "a": {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 12]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [12, 20]},
    "c": {"dtype": "F32", "shape": [], "data_offsets": [20, 24]},
}


def file_of(header: Any, data: bytes = DATA) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_tensors_are_where_safetensors_puts_them() -> None:
    tensors = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.arange(4, dtype=np.float16)}
    data = save(tensors, {"note": "of the trainer"})
    places = read_tensor_places(MemoryBytes(data))
    assert places.keys() == tensors.keys()
    for key, place in places.items():
        read = np.frombuffer(MemoryBytes(data).read(place.start, place.stop), tensors[key].dtype)
        assert np.array_equal(read.reshape(place.shape), tensors[key])


def entry(name: str, **fields: Any) -> dict[str, Any]:
    return SOUND | {name: SOUND[name] | fields}


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ([], "is not a JSON object"),
        (b"{", "is not JSON"),
        (b"\xff{}", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "is not JSON"),
        ({}, "the header ends at byte 10, and the file has 34 bytes"),
        (SOUND | {"b": 5}, "b is not told by dtype, shape and data_offsets"),
        (SOUND | {"b": {"dtype": "F16", "shape": [4]}}, "b is not told by"),
        (entry("b", dtype=16), "b has dtype 16"),
        (entry("b", shape=[-4]), r"b has dtype 'BF16', shape \[-4\]"),
        (entry("b", shape=[4.0]), r"shape \[4.0\]"),
        (entry("b", shape=[True] * 4), r"shape \[True"),
        (entry("b", shape=[1] * 100), r"b has dtype .* shape \[1, 1"),
        (entry("b", shape=[1 << 40, 1 << 40]), r"b, BF16 \[1099511627776, 1099511627776\], has 8 bytes"),
        (entry("b", shape=[5]), r"b, BF16 \[5\], has 8 bytes by its data_offsets \[12, 20\]"),
        (entry("b", dtype="F64"), r"b, F64 \[4\], has 8 bytes"),
        (entry("b", data_offsets=[20, 12]), "b, BF16 .* has -8 bytes"),
        (entry("b", data_offsets=[12]), r"data_offsets \[12\]"),
        (entry("b", data_offsets=[10, 18]), r"b begins at byte \d+, and a ends at byte \d+"),
        (entry("b", data_offsets=[16, 24]), r"b begins at byte \d+, and a ends at byte \d+"),
        (entry("b", data_offsets=[0, 8]), r"a begins at byte \d+, and b ends at byte \d+"),
        (entry("c", data_offsets=[1 << 40, (1 << 40) + 4]), r"c begins at byte \d+, and b ends at byte \d+"),
        ({key: SOUND[key] for key in "ab"}, r"b ends at byte \d+, and the file has \d+ bytes"),
        (json.dumps(SOUND).encode()[:-1] + b', "a": {}}', "its header has a twice"),
        (json.dumps(SOUND).replace("[4]", '[4], "shape": [2, 2]').encode(), "its header has shape twice"),
    ],
)
def test_a_header_that_lies_is_refused_with_the_names_and_numbers(header: Any, reason: str) -> None:
    with pytest.raises(TensorFileError, match=reason):
        read_tensor_places(MemoryBytes(file_of(header)))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "it has 0 bytes"),
        (b"1234567", "it has 7 bytes"),
        ((1 << 63).to_bytes(8, "little"), "its header has 9223372036854775808 bytes, 100000000 at most are read"),
        ((99).to_bytes(8, "little") + b"{}", "its header has 99 bytes, and the file has 10"),
    ],
)
def test_a_file_that_ends_before_its_header_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(TensorFileError, match=reason):
        read_tensor_places(MemoryBytes(data))


def test_a_header_that_is_longer_than_allowed_is_not_parsed() -> None:
    with pytest.raises(TensorFileError, match="its header has 200 bytes, 100 at most are read"):
        read_tensor_places(MemoryBytes(file_of(json.dumps(SOUND).encode().ljust(200))), max_header_bytes=100)


def test_a_file_that_is_cut_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(DATA)
    with FileBytes(tmp_path / "x") as file:
        assert (file.num_bytes, file.read(3, 9)) == (24, DATA[3:9])
        (tmp_path / "x").write_bytes(DATA[:10])
        with pytest.raises(TensorFileError, match="ends at byte 10, before byte 12"):
            file.read(4, 12)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
SIZES = st.lists(st.integers(-1, 13) | JSON, max_size=3)
ENTRY = JSON | st.fixed_dictionaries(
    {"dtype": st.sampled_from(["F16", "BF16", "F32", "U8", "F4", "no"]) | JSON, "shape": SIZES, "data_offsets": SIZES}
)


@given(
    header=st.dictionaries(st.sampled_from(["a", "b", "__metadata__", ""]), ENTRY, max_size=3),
    data=st.binary(max_size=12),
)
def test_what_is_believed_fills_the_file(header: dict[str, Any], data: bytes) -> None:
    check(file_of(header, data))


@given(position=st.integers(0, 199), byte=st.integers(0, 255))
def test_a_sound_file_with_a_changed_byte_is_read_as_safetensors_reads_it_or_refused(position: int, byte: int) -> None:
    data = bytearray(save({"x": np.ones((2, 3), np.float32), "y": np.ones(4, np.float16)}))
    data[position % len(data)] = byte
    check(bytes(data))


def check(data: bytes) -> None:
    """The tensors that are read lie one after another in the file, and safetensors reads the same ones."""
    with suppress(TensorFileError):
        places = read_tensor_places(MemoryBytes(data))
        end = 8 + int.from_bytes(data[:8], "little")
        for place in sorted(places.values(), key=lambda place: (place.start, place.stop)):
            assert place.start == end
            end = place.stop
        assert end == len(data)
        if all(place.dtype in ("F16", "F32", "U8") for place in places.values()):
            with suppress(safetensors.SafetensorError):  # which is stricter with the text of a header
                assert load(data).keys() == places.keys()
