from pathlib import Path

import numpy as np
import pytest

from multilora_client import Adapter, AdapterError, AdapterTensors, InvalidRequest
from multilora_wire.adapter_origin import AdaptedLinear, AdapterOrigin

CONFIG = np.array([[1, 0, 2, 0], [3, 1, 1, 0]], np.int32)


@pytest.mark.parametrize(("dtype", "numpy_dtype"), [("FP16", np.float16), ("FP32", np.float32), ("BF16", np.uint16)])
def test_what_is_saved_is_loaded_again(tmp_path: Path, dtype: str, numpy_dtype: type) -> None:
    tensors = AdapterTensors(np.arange(14, dtype=numpy_dtype).reshape(2, 7), CONFIG, dtype)

    tensors.save(tmp_path / "new" / "folder")
    loaded = AdapterTensors.load(tmp_path / "new" / "folder")

    assert (loaded.dtype, loaded.digest) == (dtype, tensors.digest)
    np.testing.assert_array_equal(loaded.weights, tensors.weights)
    np.testing.assert_array_equal(loaded.config, tensors.config)


def test_files_have_the_batch_dimension_and_the_types_of_upstreams_converter(tmp_path: Path) -> None:
    AdapterTensors(np.ones((2, 7), np.uint16), CONFIG, "BF16").save(tmp_path)

    weights = np.load(tmp_path / "model.lora_weights.npy", allow_pickle=False)
    config = np.load(tmp_path / "model.lora_config.npy", allow_pickle=False)

    assert (weights.dtype.str, weights.shape) == ("|V2", (1, 2, 7))
    assert (config.dtype, config.shape) == (np.int32, (1, 2, 4))


def test_old_artefacts_are_read(tmp_path: Path) -> None:
    """`lora_keys`, three columns, no batch dimension."""
    np.save(tmp_path / "model.lora_weights.npy", np.ones((2, 7), np.float32))
    np.save(tmp_path / "model.lora_keys.npy", CONFIG[:, :3])

    assert AdapterTensors.load(tmp_path).config.tolist() == [[1, 0, 2], [3, 1, 1]]


def _save_files(directory: Path, weights: object, config: object) -> None:
    np.save(directory / "model.lora_weights.npy", np.asarray(weights), allow_pickle=True)
    np.save(directory / "model.lora_config.npy", np.asarray(config), allow_pickle=True)


WEIGHTS = np.ones((1, 2, 7), np.float16)


@pytest.mark.parametrize(
    ("weights", "config", "message"),
    [
        (
            np.array([{}], object),
            CONFIG,
            r"model\.lora_weights\.npy is not a readable \.npy array without pickled",
        ),
        (WEIGHTS.astype(np.int8), CONFIG, "holds int8"),
        (WEIGHTS.astype(np.float64), CONFIG, "holds float64"),
        (WEIGHTS[0, 0], CONFIG, r"has shape \[7\]"),
        (np.ones((2, 2, 7), np.float16), CONFIG, r"has shape \[2, 2, 7\]"),
        (WEIGHTS, CONFIG[:1], r"not \[2, 7\] and \[1, 4\]"),
        (WEIGHTS, CONFIG[:, :2], r"not int32 \[2, 2\]"),
        (WEIGHTS, CONFIG.astype(np.int64), "not int64"),
    ],
)
def test_files_that_are_no_adapter_are_refused(tmp_path: Path, weights: object, config: object, message: str) -> None:
    _save_files(tmp_path, weights, config)

    with pytest.raises(AdapterError, match=message):
        AdapterTensors.load(tmp_path)


def test_garbage_archives_and_missing_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.lora_weights.npy"
    with pytest.raises(AdapterError, match=r"weights\.npy is missing"):
        AdapterTensors.load(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(AdapterError, match=r"is not a readable \.npy array"):
        AdapterTensors.load(tmp_path)
    with path.open("wb") as file:
        np.savez(file, weights=WEIGHTS)
    with pytest.raises(AdapterError, match="is an archive"):
        AdapterTensors.load(tmp_path)
    np.save(path, WEIGHTS)
    with pytest.raises(AdapterError, match=r"config\.npy is missing"):
        AdapterTensors.load(tmp_path)


def test_weights_in_the_wrong_numpy_type_are_refused() -> None:
    with pytest.raises(AdapterError, match="BF16 weights are held in uint16, not in float32"):
        AdapterTensors(np.ones((2, 7), np.float32), CONFIG, "BF16")


def test_the_digest_depends_on_every_part_of_the_content() -> None:
    weights = np.ones((2, 7), np.float16)
    other_weights, other_config = weights.copy(), CONFIG.copy()
    other_weights[1, 6] = 2
    other_config[1, 0] = 2
    variants = [
        AdapterTensors(weights, CONFIG, "FP16"),
        AdapterTensors(other_weights, CONFIG, "FP16"),
        AdapterTensors(weights, other_config, "FP16"),
        AdapterTensors(weights.view(np.uint16), CONFIG, "BF16"),
        AdapterTensors(weights, CONFIG[:, :3], "FP16"),
    ]

    assert len({tensors.digest for tensors in variants}) == len(variants)
    assert AdapterTensors(weights.copy(), CONFIG.copy(), "FP16").digest == variants[0].digest


@pytest.mark.parametrize("lora_task_id", [-1, 2**64])
def test_task_ids_are_unsigned_64_bit_numbers(lora_task_id: int, small_tensors: AdapterTensors) -> None:
    with pytest.raises(InvalidRequest, match=r"between 0 and 2\*\*64 - 1"):
        Adapter(lora_task_id, small_tensors)


ORIGIN = AdapterOrigin(
    (AdaptedLinear("model.layers.0.self_attn.q_proj", 1, 0, 2, 1), AdaptedLinear("v", 3, 1, 3, 4)), "acme/tiny"
)


def test_the_origin_is_saved_beside_the_rows_and_no_part_of_the_content(tmp_path: Path) -> None:
    known, unknown = (AdapterTensors(WEIGHTS[0], CONFIG, "FP16", origin) for origin in (ORIGIN, None))

    known.save(tmp_path)

    loaded = AdapterTensors.load(tmp_path)
    assert (loaded.origin, loaded.digest) == (ORIGIN, unknown.digest)
    unknown.save(tmp_path)
    assert AdapterTensors.load(tmp_path).origin is None


def test_an_origin_of_other_rows_is_refused(tmp_path: Path) -> None:
    AdapterTensors(WEIGHTS[0], CONFIG, "FP16", ORIGIN).save(tmp_path)
    np.save(tmp_path / "model.lora_config.npy", CONFIG[::-1])
    with pytest.raises(
        AdapterError, match=r"model\.lora_origin\.json is of another adapter .*; convert again, or delete"
    ):
        AdapterTensors.load(tmp_path)
    with pytest.raises(AdapterError, match="origin's linears must be those of config's rows"):
        AdapterTensors(WEIGHTS[0], CONFIG[::-1], "FP16", ORIGIN)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"linears": [[]]}', b"[" * 100_000, b"\xff"])
def test_an_origin_that_cannot_be_read_is_named(tmp_path: Path, content: bytes) -> None:
    AdapterTensors(WEIGHTS[0], CONFIG, "FP16", ORIGIN).save(tmp_path)
    (tmp_path / "model.lora_origin.json").write_bytes(content)
    with pytest.raises(AdapterError, match=r"model\.lora_origin\.json is not readable"):
        AdapterTensors.load(tmp_path)
