"""Headers of GGUF files: those of the `gguf` package's writer, damaged ones, and hostile ones."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multilora_wire.gguf.file import GGUFFile, read_gguf
from multilora_wire.tensor_file import MemoryBytes, TensorFileError

VALUES: dict[str, tuple[str, Any]] = {
    "a.uint8": ("add_uint8", 200),
    "a.int8": ("add_int8", -3),
    "a.uint16": ("add_uint16", 60000),
    "a.int16": ("add_int16", -300),
    "a.uint32": ("add_uint32", 1 << 31),
    "a.int32": ("add_int32", -70000),
    "a.uint64": ("add_uint64", 1 << 63),
    "a.int64": ("add_int64", -(1 << 40)),
    "a.float32": ("add_float32", 0.5),
    "a.float64": ("add_float64", 0.1),
    "a.bool": ("add_bool", True),
    "a.text": ("add_string", "Grüße"),
    "a.texts": ("add_array", ["", "ß", "c" * 300]),
    "a.integers": ("add_array", [1, -2, 3]),
    "a.floats": ("add_array", [0.25, 1.5]),
    "a.bools": ("add_array", [True, False]),
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, (method, value) in VALUES.items():
        getattr(writer, method)(key, value)
    random = np.random.default_rng(0)
    writer.add_tensor("one", random.standard_normal(5, np.float32))
    writer.add_tensor("two", random.standard_normal((3, 7), np.float32).astype(np.float16))
    blocks = gguf.quantize(random.standard_normal((2, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("three", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def read(data: bytes) -> GGUFFile:
    return read_gguf(MemoryBytes(data))


def test_values_and_places_are_those_of_the_package(file: bytes, tmp_path: Path) -> None:
    found = read(file)
    assert found.metadata == {"general.architecture": "llama", **{key: value for key, (_, value) in VALUES.items()}}
    (tmp_path / "a.gguf").write_bytes(file)
    theirs = gguf.GGUFReader(tmp_path / "a.gguf").tensors
    assert [place.key for place in found.tensors.values()] == [tensor.name for tensor in theirs]
    for place, tensor in zip(found.tensors.values(), theirs, strict=True):
        assert (place.dtype, place.shape) == (tensor.tensor_type.name, tuple(reversed(tensor.shape.tolist())))
        assert file[place.start : place.stop] == tensor.data.tobytes()


def test_a_file_cut_anywhere_is_refused(file: bytes) -> None:
    for length in range(len(file) - 31):  # The last tensor is padded to 32 bytes.
        with pytest.raises(TensorFileError):
            read(file[:length])


@settings(max_examples=300)
@given(st.data())
def test_damage_is_refused_or_changes_a_value_at_most(file: bytes, data: st.DataObject) -> None:
    damaged = bytearray(file)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(file) - 9))
        changed = data.draw(st.one_of(st.binary(min_size=1, max_size=8), st.just(b"\xff" * 8), st.just(b"\0" * 8)))
        damaged[place : place + len(changed)] = changed
    with contextlib.suppress(TensorFileError):
        for place in read(bytes(damaged)).tensors.values():
            assert 0 < place.start < place.stop <= len(damaged)


def entry(name: bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    sizes = struct.pack(f"<{len(shape)}Q", *shape)
    return (
        struct.pack("<Q", len(name)) + name + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)
    )


def header(*tensors: bytes, values: bytes = b"", num_values: int = 0, version: int = 3, num_tensors: int = -1) -> bytes:
    count = len(tensors) if num_tensors < 0 else num_tensors
    return b"GGUF" + struct.pack("<IQQ", version, count, num_values) + values + b"".join(tensors)


def value(key: bytes, kind: int, data: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GGML" + bytes(28), "does not begin with GGUF"),
        (header(version=1), "version 1; versions 2 and 3"),
        (header(version=3 << 24), "big-endian or damaged"),
        (header(num_tensors=1 << 60), "the file ends before"),
        (header(values=value(b"a", 9, struct.pack("<IQ", 0, 1 << 60)), num_values=1), "the file ends before"),
        (header(values=value(b"a", 9, struct.pack("<IQ", 8, 1 << 60)), num_values=1), "texts, 4194304 at most"),
        (header(values=value(b"a", 9, struct.pack("<IQ", 9, 1)), num_values=1), "a has a value of type 9"),
        (header(values=value(b"a", 13, b""), num_values=1), "a has a value of type 13"),
        (header(values=value(b"a", 7, b"\1") * 2, num_values=2), "its metadata has a twice"),
        (header(values=value(b"a", 8, struct.pack("<Q", 1) + b"\xff"), num_values=1), "is not UTF-8"),
        (header(values=value(b"a" * 300, 7, b"\1"), num_values=1), "a name at byte .* has 300 bytes"),
        (header(values=value(b"general.alignment", 4, struct.pack("<I", 48)), num_values=1), "alignment is 48"),
        (header(entry(b"t", (4,), 0, 0)), "t ends at byte 80, and the file has 57 bytes"),
        (header(entry(b"t", (1,) * 5, 0, 0)), "t has 5 dimensions"),
        (header(entry(b"t", (), 0, 0)), "t has 0 dimensions"),
        (header(entry(b"t", (0,), 0, 0)), r"t has shape \[0\]"),
        (header(entry(b"t", (1 << 40, 1 << 40), 0, 0)), "t has shape"),
        (header(entry(b"t", (33,), 8, 0)), "whole blocks of 32"),
        (header(entry(b"t", (256,), 10, 0)), "t is Q2_K, which is not served, only F32, F16"),
        (header(entry(b"t", (256,), 23, 0)), "t is IQ4_XS, which is not served"),
        (header(entry(b"t", (4,), 99, 0)), "t has type 99, which is not known"),
        (header(entry(b"t", (4,), 0, 5)) + bytes(64), "t has offset 5"),
        (header(entry(b"t", (4,), 0, 0), entry(b"t", (4,), 0, 32)) + bytes(99), "the tensor t twice"),
        (header(entry(b"t", (64,), 0, 0), entry(b"u", (4,), 0, 32)) + bytes(999), "u begins at byte .* and t ends at"),
    ],
)
def test_a_header_that_does_not_add_up_is_refused_by_name(data: bytes, message: str) -> None:
    with pytest.raises(TensorFileError, match=message):
        read(data)


def test_a_header_beyond_the_limit_is_refused(file: bytes) -> None:
    with pytest.raises(TensorFileError, match="700 at most are read"):
        read_gguf(MemoryBytes(file), max_header_bytes=700)
