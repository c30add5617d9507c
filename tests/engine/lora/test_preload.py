"""`lora_prefetch_dir`: its adapters are loaded, and a broken folder is named and hurts no other one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from support.adapters import TINY, WireAdapter, wire_adapter
from support.sources import USE, write_use

from multilora_engine.errors import ConfigError
from multilora_engine.lora.device_tier import DeviceTier
from multilora_engine.lora.folder_use import UseReader
from multilora_engine.lora.format import pack_adapter
from multilora_engine.lora.host_tier import HostTier
from multilora_engine.lora.layout import AdapterTraits
from multilora_engine.lora.manager import LoRAManager
from multilora_engine.lora.preload import preload_adapters
from multilora_wire.adapter_origin import AdaptedLinear, AdapterOrigin

ROWS = [(1, 0, 4), (6, 2, 16)]
SIDES = {1: (24, 40), 6: (56, 24)}
BIG_ID = (1 << 64) - 1


def build_manager(num_pages: int = 16) -> LoRAManager:
    host = HostTier(num_pages, TINY.page_bytes)
    return LoRAManager(host, DeviceTier(TINY, host.pool, host.pool, 4), "refuse")


def write_folder(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> WireAdapter:
    folder.mkdir(parents=True)
    wire = wire_adapter(TINY, ROWS, seed=seed, dtype=dtype)
    weights = wire.weights.view(torch.int16).numpy().view("V2") if dtype == torch.bfloat16 else wire.weights.numpy()
    np.save(folder / "model.lora_weights.npy", weights[np.newaxis])
    np.save(folder / "model.lora_config.npy", wire.config.numpy()[np.newaxis])
    return wire


def digest(wire: WireAdapter) -> str:
    return pack_adapter(wire.weights, wire.config, TINY).digest


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_numbered_folders_become_adapters(tmp_path: Path, dtype: torch.dtype) -> None:
    wires = {task: write_folder(tmp_path / str(task), task % 97, dtype) for task in (0, 12, BIG_ID)}
    manager = build_manager()
    preload_adapters(tmp_path, manager, TINY)
    assert {info.lora_task_id: info.digest for info in manager.inventory.describe()} == {
        t: digest(w) for t, w in wires.items()
    }


def test_what_a_folder_says_of_the_use_is_read(tmp_path: Path, reader: UseReader) -> None:
    wire = write_folder(tmp_path / "7")
    write_use(tmp_path / "7")
    manager = build_manager()
    preload_adapters(tmp_path, manager, TINY, reader)
    info = manager.inventory.info(7)
    assert info.use == USE.describe()
    assert info.digest == AdapterTraits(use=USE.text).digest(digest(wire))


def test_the_origin_that_our_converter_writes_beside_the_pair_is_read(tmp_path: Path) -> None:
    wire = write_folder(tmp_path / "7")
    _origin(tmp_path / "7")
    manager = build_manager()
    preload_adapters(tmp_path, manager, TINY)
    assert manager.inventory.info(7).digest == digest(wire)


def test_files_of_other_kinds_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture, reader: UseReader) -> None:
    for task in (3, 4, 5):
        write_folder(tmp_path / str(task), seed=task)
        (tmp_path / str(task) / "adapter_model.safetensors").touch()
    (tmp_path / "5" / "README.md").touch()
    write_folder(tmp_path / "6")
    write_use(tmp_path / "6")
    _origin(tmp_path / "6")
    preload_adapters(tmp_path, build_manager(), TINY, reader)
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.endswith("are read, and not adapter_model.safetensors (in 3), README.md (in 1)")


def test_old_artefacts_are_read(tmp_path: Path) -> None:
    wire = write_folder(tmp_path / "7")
    np.save(tmp_path / "7" / "model.lora_weights.npy", wire.weights.numpy())
    np.save(tmp_path / "7" / "model.lora_keys.npy", wire.config.numpy()[:, :3])
    (tmp_path / "7" / "model.lora_config.npy").unlink()
    manager = build_manager()
    preload_adapters(tmp_path, manager, TINY)
    assert manager.inventory.info(7).digest == digest(wire)


def _pickle(folder: Path) -> None:
    np.save(folder / "model.lora_weights.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)


def _truncate(folder: Path) -> None:
    path = folder / "model.lora_weights.npy"
    path.write_bytes(path.read_bytes()[:-1])


def _claim_4_gib(folder: Path) -> None:
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2, 536870912), }"
    header += b" " * (117 - len(header)) + b"\n"
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    (folder / "model.lora_weights.npy").write_bytes(content + b"\x00" * 100)


def _claim_8_pib(folder: Path) -> None:
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2, 1000000000000000), }"
    header += b" " * (117 - len(header)) + b"\n"
    (folder / "model.lora_weights.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)


def _loop(folder: Path) -> None:
    (folder / "model.lora_weights.npy").unlink()
    (folder / "model.lora_weights.npy").symlink_to("model.lora_weights.npy")


def _archive(folder: Path) -> None:
    with (folder / "model.lora_weights.npy").open("wb") as file:
        np.savez(file, a=np.zeros(3))


def _empty(folder: Path) -> None:
    (folder / "model.lora_config.npy").write_bytes(b"")


def _no_config(folder: Path) -> None:
    (folder / "model.lora_config.npy").unlink()


def _link_outside(folder: Path) -> None:
    path = folder / "model.lora_weights.npy"
    outside = folder.parent.parent / "outside.npy"
    path.rename(outside)
    path.symlink_to(outside)


def _link_of_the_folder(folder: Path) -> None:
    folder.rename(folder.parent.parent / "elsewhere")
    folder.symlink_to(folder.parent.parent / "elsewhere")


def _fifo(folder: Path) -> None:
    (folder / "model.lora_config.npy").unlink()
    os.mkfifo(folder / "model.lora_config.npy")


def _doubles(folder: Path) -> None:
    np.save(folder / "model.lora_weights.npy", np.zeros((1, 2, 9000)))


def _float_config(folder: Path) -> None:
    np.save(folder / "model.lora_config.npy", np.zeros((1, 2, 4), np.float32))


def _wrong_rank(folder: Path) -> None:
    np.save(folder / "model.lora_config.npy", np.array([[[1, 0, 99, 0], [6, 2, 16, 0]]], np.int32))


def _origin(folder: Path, **changes: int) -> None:
    linears = [AdaptedLinear(f"model.layers.{layer}", m, layer, *SIDES[m]) for m, layer, _ in ROWS]
    changed = msgspec.structs.replace(linears[0], **changes)
    (folder / "model.lora_origin.json").write_bytes(msgspec.json.encode(AdapterOrigin((changed, *linears[1:]), "acme")))


def _link_of_the_origin(folder: Path) -> None:
    _origin(folder)
    (folder / "model.lora_origin.json").rename(folder.parent.parent / "origin.json")
    (folder / "model.lora_origin.json").symlink_to(folder.parent.parent / "origin.json")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_pickle, "without pickled objects"),
        (_truncate, "model.lora_weights.npy is not a readable"),
        (_claim_4_gib, "model.lora_weights.npy is not a readable"),
        (_claim_8_pib, "it cannot be read: MemoryError"),
        (_loop, "it cannot be read: RuntimeError: Symlink loop"),
        (_archive, "is an archive"),
        (_empty, "model.lora_config.npy is not a readable"),
        (_no_config, "model.lora_config.npy is missing"),
        (_link_outside, "model.lora_weights.npy is a link out of the directory"),
        (_link_of_the_folder, "is a link out of the directory"),
        (_fifo, "model.lora_config.npy is not a file"),
        (_doubles, "holds float64"),
        (_float_config, "holds float32; int32 is expected"),
        (_wrong_rank, "Invalid low_rank (99)"),
        (
            lambda folder: _origin(folder, in_size=40, out_size=24),
            "made for acme, not for the model here: model.layers.0",
        ),
        (lambda folder: _origin(folder, module_id=2), "model.lora_origin.json is of another adapter"),
        (lambda folder: (folder / "model.lora_origin.json").write_text("{}"), "model.lora_origin.json is not readable"),
        (_link_of_the_origin, "model.lora_origin.json is a link out of the directory"),
        (lambda folder: (folder / "model.lora_origin.json").symlink_to("x"), "model.lora_origin.json is missing"),
    ],
)
def test_a_broken_folder_is_reported_and_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], reason: str
) -> None:
    directory = tmp_path / "prefetch"
    good = write_folder(directory / "5", seed=5)
    write_folder(directory / "3", seed=3)
    damage(directory / "3")
    manager = build_manager()
    preload_adapters(directory, manager, TINY)
    assert [(info.lora_task_id, info.digest) for info in manager.inventory.describe()] == [(5, digest(good))]
    (error,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "3 is skipped" in error
    assert reason in error


@pytest.mark.parametrize("name", [str(1 << 64), "seven", "-1", "٣"])
def test_a_name_that_is_no_task_id_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    write_folder(tmp_path / name)
    manager = build_manager()
    preload_adapters(tmp_path, manager, TINY)
    assert manager.inventory.describe() == []
    assert f"{name} is ignored: its name is not a task id" in caplog.text


def test_two_folders_of_one_id_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = write_folder(tmp_path / "07", seed=1)
    write_folder(tmp_path / "7", seed=2)
    manager = build_manager()
    preload_adapters(tmp_path, manager, TINY)
    assert manager.inventory.info(7).digest == digest(first)
    assert "7 is skipped: another folder has the same task id" in caplog.text


def test_what_does_not_fit_is_left_out_and_pushes_nothing_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for task in range(4):
        write_folder(tmp_path / str(task), seed=task)
    manager = build_manager(num_pages=2)
    preload_adapters(tmp_path, manager, TINY)
    assert [info.lora_task_id for info in manager.inventory.describe()] == [0, 1]
    assert "no room for 2 of its adapters, from 2 on" in caplog.text


def test_a_missing_directory_refuses_to_load(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora_prefetch_dir: .*nowhere is not a directory"):
        preload_adapters(tmp_path / "nowhere", build_manager(), TINY)
