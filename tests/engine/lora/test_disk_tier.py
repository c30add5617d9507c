"""Adapters as files: the adapter that comes back is the evicted one, and a foreign file hurts no other adapter."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from support.adapters import TINY, wire_adapter

from multilora_engine.errors import ConfigError
from multilora_engine.lora import adapter_file
from multilora_engine.lora.adapter_file import (
    DamagedFile,
    describe_file,
    encode_header,
    open_regular,
    read_file,
    write_file_atomically,
)
from multilora_engine.lora.adapter_state import File
from multilora_engine.lora.disk_tier import DiskTier
from multilora_engine.lora.format import pack_adapter
from multilora_engine.lora.layout import NO_TRAITS, AdapterTraits, PackedAdapter
from multilora_engine.lora.names import TaskId, TenantTaskId
from multilora_wire.adapter_event import AdapterEvent

BIG_ID = (1 << 64) - 1


def packed_adapter(seed: int, traits: AdapterTraits = NO_TRAITS) -> PackedAdapter:
    rows = [(1, 0, 4)] + [(module, layer, 16) for layer in range(3) for module in (5, 6, 7)]
    wire = wire_adapter(TINY, rows, seed=seed)
    return pack_adapter(wire.weights, wire.config, TINY, traits)


FIRST, SECOND = packed_adapter(1), packed_adapter(2)
FILE_BYTES = FIRST.pages.numel() * 3 // 2
"""More than one file takes, less than two."""


@pytest.fixture
def tiers() -> Iterator[list[DiskTier]]:
    opened: list[DiskTier] = []
    yield opened
    for tier in opened:
        tier.close()


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A directory in which a server left the adapters 1 and 2."""
    tier = DiskTier(tmp_path, 1 << 20, TINY)
    for task, adapter in enumerate((FIRST, SECOND), start=1):
        store(tier, task, adapter)
    tier.close()
    return tmp_path


def start(tier: DiskTier, task: TaskId, adapter: PackedAdapter) -> list[File]:
    """Have an adapter written; the list gets what `on_written` is told."""
    told: list[File] = []
    pages, name = list(adapter.pages), f"name-{task}"
    tier.store(task, adapter.digest, name, adapter.rows, pages, told.append, traits=adapter.traits)
    return told


def finish(tier: DiskTier) -> None:
    wait(tier.writes, timeout=60)
    tier.poll()


def store(tier: DiskTier, task: TaskId, adapter: PackedAdapter) -> bool:
    """Write an adapter; whether it has a file then."""
    told = start(tier, task, adapter)
    finish(tier)
    tier.check_integrity()
    (file,) = told
    return file is File.WRITTEN


def read(tier: DiskTier, task: TaskId, num_pages: int) -> tuple[list[Any], torch.Tensor]:
    pages = torch.zeros(num_pages, TINY.page_bytes, dtype=torch.uint8)
    return tier.open(task).read(list(pages)).result(timeout=60), pages


def assert_reads(tier: DiskTier, task: TaskId, adapter: PackedAdapter) -> None:
    rows, pages = read(tier, task, len(adapter.pages))
    assert rows == adapter.rows
    assert torch.equal(pages, adapter.pages)


@pytest.mark.parametrize("traits", [NO_TRAITS, AdapterTraits(invocation_tokens=(0, 7, 7))])
def test_what_was_stored_comes_back_and_after_a_restart_too(
    tmp_path: Path, tiers: list[DiskTier], traits: AdapterTraits
) -> None:
    tier, adapter = DiskTier(tmp_path, 1 << 20, TINY), packed_adapter(1, traits)
    store(tier, BIG_ID, adapter)
    assert_reads(tier, BIG_ID, adapter)
    tier.close()
    tiers.append(again := DiskTier(tmp_path, 1 << 20, TINY))
    (known,) = again.adapters
    assert (known.lora_task_id, known.digest, known.name, known.ranks, known.traits) == (
        BIG_ID,
        adapter.digest,
        f"name-{BIG_ID}",
        (4, 16),
        traits,
    )
    assert_reads(again, BIG_ID, adapter)


def test_the_file_of_a_plain_adapter_says_nothing_of_traits(filled: Path) -> None:
    """So that it is the file that earlier releases wrote, and read."""
    with safe_open(filled / "1.safetensors", "pt") as file:
        assert set(file.metadata()) == {"format_version", "lora_task_id", "name", "digest", "layout", "rows"}


@pytest.mark.parametrize("traits", [b"[56]", b"[-1]", b"{{}}", b"1234"])
def test_a_file_with_other_traits_than_its_digest_is_of_is_refused(tmp_path: Path, traits: bytes) -> None:
    tier = DiskTier(tmp_path, 1 << 20, TINY)
    store(tier, 7, packed_adapter(1, AdapterTraits(invocation_tokens=(55,))))
    tier.close()
    path = tmp_path / "7.safetensors"
    path.write_bytes(path.read_bytes().replace(b"[55]", traits, 1))
    with pytest.raises(DamagedFile, match=r"traits are none of ours|does not have the digest"):
        read_whole(path)


def read_whole(path: Path) -> None:
    known = describe_file(path, TINY)
    pages = torch.zeros(known.num_pages, TINY.page_bytes, dtype=torch.uint8)
    read_file(open_regular(path), known, list(pages), TINY)


def test_equal_numbers_of_two_tenants_are_two_files_over_a_restart(tmp_path: Path, tiers: list[DiskTier]) -> None:
    tier = DiskTier(tmp_path, 1 << 20, TINY)
    owned = {7: FIRST, TenantTaskId("acme", 7): SECOND, TenantTaskId("bolt", 7): FIRST}
    for task, adapter in owned.items():
        store(tier, task, adapter)
    tier.delete(TenantTaskId("bolt", 7))
    tier.close()
    tiers.append(again := DiskTier(tmp_path, 1 << 20, TINY))
    assert {adapter.lora_task_id for adapter in again.adapters} == {7, TenantTaskId("acme", 7)}
    assert_reads(again, 7, FIRST)
    assert_reads(again, TenantTaskId("acme", 7), SECOND)


def test_a_tenants_file_under_another_tenants_name_is_left_alone(tmp_path: Path, tiers: list[DiskTier]) -> None:
    tier = DiskTier(tmp_path, 1 << 20, TINY)
    store(tier, TenantTaskId("acme", 7), FIRST)
    tier.close()
    (tmp_path / "acme@7.safetensors").rename(tmp_path / "bolt@7.safetensors")
    tiers.append(again := DiskTier(tmp_path, 1 << 20, TINY))
    assert again.adapters == []


def test_a_file_is_safetensors_of_the_adapters_own_pages(filled: Path) -> None:
    with safe_open(filled / "1.safetensors", framework="pt") as file:
        assert file.metadata()["digest"] == FIRST.digest
        assert file.metadata()["lora_task_id"] == "1"
        assert torch.equal(file.get_tensor("pages"), FIRST.pages)


def test_the_least_recently_used_files_go_first_and_the_budget_holds(tmp_path: Path, tiers: list[DiskTier]) -> None:
    events: list[AdapterEvent] = []
    tiers.append(tier := DiskTier(tmp_path, 2 * FILE_BYTES, TINY, on_event=events.append))
    for task in (1, 2):
        store(tier, task, FIRST)
    assert_reads(tier, 1, FIRST)
    store(tier, 3, SECOND)
    assert [adapter.lora_task_id for adapter in tier.adapters] == [1, 3]
    assert tier.stats.evictions == 1
    assert ("deleted_from_disk", 2) in [(event.kind, event.lora_task_id) for event in events]
    assert not (tmp_path / "2.safetensors").exists(), "it goes before another one is written"


def test_the_order_of_use_survives_a_restart(filled: Path, tiers: list[DiskTier]) -> None:
    os.utime(filled / "1.safetensors", (2_000_000_000, 2_000_000_000))
    tier = DiskTier(filled, FILE_BYTES, TINY)
    assert [adapter.lora_task_id for adapter in tier.adapters] == [1]
    tier.close()
    assert not (filled / "2.safetensors").exists()


def test_a_touched_file_is_the_most_recently_used_after_a_restart_too(filled: Path, tiers: list[DiskTier]) -> None:
    for task in (1, 2):
        os.utime(filled / f"{task}.safetensors", (1_000_000_000 + task, 1_000_000_000 + task))
    tier = DiskTier(filled, 1 << 20, TINY)
    tier.touch(1)
    assert [adapter.lora_task_id for adapter in tier.adapters] == [2, 1]
    tier.close()
    tiers.append(again := DiskTier(filled, 1 << 20, TINY))
    assert [adapter.lora_task_id for adapter in again.adapters] == [2, 1]


def test_an_adapter_larger_than_the_budget_is_not_kept(tmp_path: Path, tiers: list[DiskTier]) -> None:
    tiers.append(tier := DiskTier(tmp_path, 100, TINY))
    assert not store(tier, 1, FIRST)
    assert len(tier) == 0
    assert tier.stats.failures == 1


def test_a_deleted_adapter_is_gone_at_once_and_for_good(filled: Path, tiers: list[DiskTier]) -> None:
    tier = DiskTier(filled, 1 << 20, TINY)
    still_open = tier.open(1)
    tier.delete(1)
    assert tier.find(1) is None
    pages = torch.zeros_like(FIRST.pages)
    still_open.read(list(pages)).result(timeout=60)
    assert torch.equal(pages, FIRST.pages), "who had begun to read it still gets it"
    assert store(tier, 1, SECOND)
    tier.open(2).close()
    tier.delete(2)
    tier.close()
    assert not (filled / "2.safetensors").exists()
    tiers.append(again := DiskTier(filled, 1 << 20, TINY))
    assert_reads(again, 1, SECOND)


def test_a_full_disk_costs_the_adapter_and_nothing_else(tmp_path: Path, tiers: list[DiskTier]) -> None:
    def fail(path: Path, header: bytes, pages: Sequence[torch.Tensor]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    tiers.append(tier := DiskTier(tmp_path, 1 << 20, TINY, write_file=fail))
    assert not any(store(tier, task, FIRST) for task in range(10))
    assert len(tier) == 0
    assert tier.stats.failures == 10
    assert tier.stats.bytes_used == 0


def test_what_is_deleted_while_a_slow_disk_writes_it_leaves_no_file(tmp_path: Path) -> None:
    is_writing, may_write = threading.Event(), threading.Event()

    def write_slowly(path: Path, header: bytes, pages: Sequence[torch.Tensor]) -> None:
        is_writing.set()
        assert may_write.wait(60)
        write_file_atomically(path, header, pages)

    tier = DiskTier(tmp_path, 2 * FILE_BYTES, TINY, write_file=write_slowly)
    old, queued = start(tier, 1, FIRST), start(tier, 2, FIRST)
    assert is_writing.wait(60)
    tier.delete(1)
    tier.delete(2)
    new = start(tier, 1, SECOND)
    tier.check_integrity()
    tier.poll()
    assert old == queued == new == [], "its pages are still read, or may be"
    may_write.set()
    finish(tier)
    assert old == queued == [File.NONE]
    assert new == [File.WRITTEN]
    assert_reads(tier, 1, SECOND)
    tier.close()
    assert [path.name for path in tmp_path.iterdir()] == ["1.safetensors"]


def test_with_the_whole_budget_being_written_the_newest_is_kept(tmp_path: Path, tiers: list[DiskTier]) -> None:
    may_write = threading.Event()

    def write_slowly(path: Path, header: bytes, pages: Sequence[torch.Tensor]) -> None:
        assert may_write.wait(60)
        write_file_atomically(path, header, pages)

    tiers.append(tier := DiskTier(tmp_path, FILE_BYTES, TINY, write_file=write_slowly))
    for task in (1, 2, 3):
        start(tier, task, FIRST)
        tier.check_integrity()
    may_write.set()
    finish(tier)
    assert [adapter.lora_task_id for adapter in tier.adapters] == [3]
    assert tier.stats.evictions == 2
    tiers.pop().close()
    assert [path.name for path in tmp_path.iterdir()] == ["3.safetensors"]


def test_a_failed_write_leaves_no_file_behind(tmp_path: Path, tiers: list[DiskTier]) -> None:
    tier = DiskTier(tmp_path / "cache", 1 << 20, TINY)
    (tmp_path / "cache" / "1.safetensors").mkdir()
    assert not store(tier, 1, FIRST)
    tier.close()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["1.safetensors"]
    assert tier.stats.failures == 1


def test_a_directory_has_one_server(tmp_path: Path, tiers: list[DiskTier]) -> None:
    tiers.append(DiskTier(tmp_path, 1 << 20, TINY))
    with pytest.raises(ConfigError, match="lora_cache_dir: another server uses"):
        DiskTier(tmp_path, 1 << 20, TINY)


def test_a_directory_that_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"lora_cache_dir: .*file"):
        DiskTier(tmp_path / "file" / "cache", 1 << 20, TINY)


def test_a_budget_that_the_file_system_has_no_room_for_is_told(
    filled: Path, tiers: list[DiskTier], caplog: pytest.LogCaptureFixture
) -> None:
    free = shutil.disk_usage(filled).free
    used = sum(file.stat().st_size for file in filled.glob("*.safetensors"))
    tiers.append(DiskTier(filled, free // 2, TINY))
    assert "fewer than lora_cache_disk_bytes" not in caplog.text
    tiers.pop().close()
    tiers.append(DiskTier(filled, 2 * free + used, TINY))
    assert f"GiB are free at {filled}, fewer than lora_cache_disk_bytes" in caplog.text


def test_what_a_crash_left_half_written_is_cleared_away(filled: Path, tiers: list[DiskTier]) -> None:
    (filled / ".7.safetensors.part").write_bytes(b"half")
    tiers.append(tier := DiskTier(filled, 1 << 20, TINY))
    assert len(tier) == 2
    assert not (filled / ".7.safetensors.part").exists()


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _claim_4_gib(path: Path) -> None:
    path.write_bytes((4 << 30).to_bytes(8, "little") + path.read_bytes()[8:])


def _pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"pages": [1, 2, 3]}))


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _link_outside(path: Path) -> None:
    outside = path.parent.parent / "outside.safetensors"
    path.rename(outside)
    path.symlink_to(outside)


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _rename(path: Path) -> None:
    path.rename(path.with_name("11.safetensors"))


def _odd_name(path: Path) -> None:
    path.rename(path.with_name("01.safetensors"))


def _edit_header(path: Path, edit: Any) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    edit(header)
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + content[8 + length :])


def _older_format(path: Path) -> None:
    _edit_header(path, lambda header: header["__metadata__"].update(format_version="0"))


def _format_2(path: Path) -> None:
    """Its layout had no version and knew one kind of model."""
    sizes = {"num_layers": 3, "hidden_size": 24, "q_size": 40, "kv_size": 8, "intermediate_size": 56}
    layout = json.dumps(sizes | {"max_rank": 16, "lora_dtype": "float32", "page_bytes": TINY.page_bytes})
    _edit_header(path, lambda header: header["__metadata__"].update(format_version="2", layout=layout))


def _newer_layout(path: Path) -> None:
    def edit(header: Any) -> None:
        layout = json.loads(header["__metadata__"]["layout"])
        header["__metadata__"]["layout"] = json.dumps(layout | {"version": TINY.version + 1})

    _edit_header(path, edit)


def _rows_outside(path: Path) -> None:
    def edit(header: Any) -> None:
        rows = json.loads(header["__metadata__"]["rows"])
        rows[0]["a_offset"] = 1 << 40
        header["__metadata__"]["rows"] = json.dumps(rows)

    _edit_header(path, edit)


def _claim_more_pages(path: Path) -> None:
    _edit_header(path, lambda header: header["pages"].update(shape=[1 << 40, TINY.page_bytes]))


def _with_header(path: Path, header: bytes) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])


def _no_utf_8(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"name-1", b"name-\xff"))


def _deep(path: Path) -> None:
    _with_header(path, b'{"x":' + b"[" * 100_000)


def _deep_rows(path: Path) -> None:
    _edit_header(path, lambda header: header["__metadata__"].update(rows='[{"x":' + "[" * 100_000))


def _deep_layout(path: Path) -> None:
    _edit_header(path, lambda header: header["__metadata__"].update(layout='{"x":' * 50_000))


def _long_number(path: Path) -> None:
    _edit_header(path, lambda header: header["pages"].update(shape=[10**4000, 1]))


def _huge_offset(path: Path) -> None:
    def edit(header: Any) -> None:
        rows = json.loads(header["__metadata__"]["rows"])
        rows[0].update(layer=-(10**30), rank=10**30)
        header["__metadata__"]["rows"] = json.dumps(rows)

    _edit_header(path, edit)


def _no_digest(path: Path) -> None:
    _edit_header(path, lambda header: header["__metadata__"].update(digest="x" * 32))


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").write_text("of somebody else")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_truncate, "its header accounts for"),
        (_claim_4_gib, "its header claims 4294967296 bytes"),
        (_pickle, "its header claims"),
        (_empty, "its header claims 0 bytes, the file has 0"),
        (_link_outside, "symbolic links"),
        (_fifo, "not a regular file"),
        (_rename, "it is of LoRA task 1"),
        (_odd_name, "its name is not"),
        (_older_format, "its format version is 0"),
        (_format_2, "its format version is 2, this server's is 3"),
        (_newer_layout, f"its layout has version {TINY.version + 1}, this server's has {TINY.version}"),
        (_rows_outside, "does not lie where packing puts it"),
        (_claim_more_pages, "its tensor is"),
        (_no_utf_8, "it cannot be read: UnicodeDecodeError"),
        (_deep, "it cannot be read: RecursionError"),
        (_deep_rows, "it cannot be read: RecursionError"),
        (_deep_layout, "it cannot be read: RecursionError"),
        (_long_number, "its tensor is"),
        (_huge_offset, "does not fit the model"),
        (_no_digest, "its digest is 'xxxx"),
        (_directory, "not a regular file"),
    ],
)
def test_a_file_that_is_not_ours_is_named_at_start_and_left_alone(
    tmp_path: Path, tiers: list[DiskTier], caplog: pytest.LogCaptureFixture, damage: Any, reason: str
) -> None:
    directory = tmp_path / "cache"
    tier = DiskTier(directory, 1 << 20, TINY)
    store(tier, 1, FIRST)
    store(tier, 2, SECOND)
    tier.close()
    damage(directory / "1.safetensors")
    names = {path.name for path in directory.iterdir()}
    tiers.append(again := DiskTier(directory, 1 << 20, TINY))
    assert [adapter.lora_task_id for adapter in again.adapters] == [2]
    assert_reads(again, 2, SECOND)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "1.safetensors in lora_cache_dir is not used" in warning
    assert reason in warning
    assert {path.name for path in directory.iterdir()} == names


def test_files_of_an_older_version_are_named_in_one_line_and_give_way_to_new_ones(
    filled: Path, tiers: list[DiskTier], caplog: pytest.LogCaptureFixture
) -> None:
    for task in (1, 2):
        _edit_header(
            filled / f"{task}.safetensors", lambda header: header["__metadata__"].update(format_version="1", digest="0")
        )
    tier = DiskTier(filled, 1 << 20, TINY)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning == (
        "1.safetensors and 1 more in lora_cache_dir are not used, and deleted when others need the room: its format "
        "version is 1, this server's is 3"
    )
    assert len(tier) == 0
    store(tier, 1, FIRST)
    tier.close()
    tiers.append(again := DiskTier(filled, 1 << 20, TINY))
    assert_reads(again, 1, FIRST)


@pytest.mark.parametrize("change", [{"max_rank": 8}, {"checkpoint": "of other weights"}])
def test_files_of_another_layout_are_left_alone_until_others_need_the_room(
    filled: Path, tiers: list[DiskTier], change: dict[str, Any]
) -> None:
    other = replace(TINY, **change)
    sizes = {path: path.stat().st_size for path in filled.iterdir()}
    assert set(sizes) == {filled / "1.safetensors", filled / "2.safetensors"}
    (filled / "notes.safetensors").write_bytes(b"of somebody else")
    tier = DiskTier(filled, 1 << 20, other)
    assert (len(tier), tier.stats.bytes_used) == (0, sum(sizes.values()))
    assert all(path.exists() for path in sizes)
    tier.close()
    least = max(sizes.values())
    tier = DiskTier(filled, least, other)
    tier.check_integrity()
    tier.close()
    assert sum(path.exists() for path in sizes) == 1
    tiers.append(tier := DiskTier(filled, least, TINY))
    store(tier, 3, FIRST)
    tier.check_integrity()
    assert_reads(tier, 3, FIRST)
    assert (filled / "notes.safetensors").exists()


@pytest.mark.parametrize(
    "damage",
    [
        _truncate,
        _claim_4_gib,
        _link_outside,
        _older_format,
        Path.unlink,
        _no_utf_8,
        _deep,
        _deep_rows,
        _directory,
        _fifo,
    ],
)
def test_a_file_damaged_while_the_server_runs_is_found_when_it_is_read(
    tmp_path: Path, tiers: list[DiskTier], damage: Any
) -> None:
    directory = tmp_path / "cache"
    tier = DiskTier(directory, 1 << 20, TINY)
    store(tier, 1, FIRST)
    tier.close()
    tiers.append(again := DiskTier(directory, 1 << 20, TINY))
    damage(directory / "1.safetensors")
    with pytest.raises((DamagedFile, OSError)):
        read(again, 1, len(FIRST.pages))


SMALL_LAYOUT = replace(TINY, page_bytes=512, max_rank=2, checkpoint="of these weights")


def small_adapter() -> PackedAdapter:
    wire = wire_adapter(SMALL_LAYOUT, [(1, 0, 1)], seed=5)
    return pack_adapter(wire.weights, wire.config, SMALL_LAYOUT, AdapterTraits(invocation_tokens=(56, 7)))


def small_file(directory: Path) -> Path:
    """The file of `small_adapter`, as the task 7."""
    adapter, path = small_adapter(), directory / "7.safetensors"
    num_pages = len(adapter.pages)
    header = encode_header(7, adapter.digest, "named", adapter.rows, num_pages, SMALL_LAYOUT, adapter.traits)
    write_file_atomically(path, header, list(adapter.pages))
    return path


def assert_right_or_damaged(path: Path) -> bool:
    """Whether a file can be read; then the adapter is the right one."""
    right = small_adapter()
    try:
        known = describe_file(path, SMALL_LAYOUT)
        assert known.num_bytes == path.stat().st_size
        pages = torch.zeros(known.num_pages, SMALL_LAYOUT.page_bytes, dtype=torch.uint8)
        rows = read_file(open_regular(path), known, list(pages), SMALL_LAYOUT)
    except (DamagedFile, OSError):
        return False
    assert (known.lora_task_id, known.digest, known.ranks, rows) == (7, right.digest, (1,), right.rows)
    assert known.traits == right.traits
    assert torch.equal(pages, right.pages)
    return True


def test_no_flipped_bit_and_no_cut_gives_another_adapter(tmp_path: Path) -> None:
    """Every bit of the header, a bit of every other byte, and each length up to the pages and some further on."""
    path = small_file(tmp_path)
    content = path.read_bytes()
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    assert assert_right_or_damaged(path)
    bits = [(place, bit) for place in range(header_bytes) for bit in range(8)]
    bits += [(place, place % 8) for place in range(header_bytes, len(content))]
    num_read = 0
    with path.open("r+b", 0) as file:
        for place, bit in bits:
            os.pwrite(file.fileno(), bytes([content[place] ^ 1 << bit]), place)
            num_read += assert_right_or_damaged(path)
            os.pwrite(file.fileno(), content[place : place + 1], place)
        for length in [*range(len(content) - 1, header_bytes, -37), *range(header_bytes, -1, -1)]:
            file.truncate(length)
            assert not assert_right_or_damaged(path)
    # Only a name may be any text of UTF-8.
    assert num_read == 7 * len("named")


@given(garbage=st.binary(max_size=200), place=st.integers(0, 2000), is_inserted=st.booleans())
def test_no_garbage_gives_another_adapter(
    tmp_path_factory: pytest.TempPathFactory, garbage: bytes, place: int, is_inserted: bool
) -> None:
    path = small_file(tmp_path_factory.mktemp("cache"))
    content = path.read_bytes()
    path.write_bytes(content[:place] + garbage + content[place + (0 if is_inserted else len(garbage)) :])
    assert_right_or_damaged(path)


def test_a_directory_full_of_damage_starts_and_what_is_sent_again_takes_its_place(
    tmp_path: Path, tiers: list[DiskTier]
) -> None:
    """Damage of every kind side by side, and names of every kind."""
    tier = DiskTier(tmp_path, 1 << 24, TINY)
    kinds = [_truncate, _claim_4_gib, _pickle, _empty, _fifo, _deep, _deep_rows, _long_number, _huge_offset, _no_digest]
    for task in range(1, len(kinds) + 2):
        store(tier, task, FIRST)
    tier.close()
    for task, damage in enumerate(kinds, start=1):
        damage(tmp_path / f"{task}.safetensors")
    (tmp_path / "106.safetensors").mkdir()
    (tmp_path / ".107.safetensors.part").mkdir()
    for name in (b"\xff\xfe.safetensors", b"1\n2.safetensors", b".safetensors", b"+1.safetensors", b"1e3.safetensors"):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_bytes(b"of somebody else")
    tiers.append(again := DiskTier(tmp_path, 1 << 24, TINY))
    again.check_integrity()
    assert [adapter.lora_task_id for adapter in again.adapters] == [len(kinds) + 1]
    for task in range(1, len(kinds) + 1):
        assert store(again, task, SECOND)
        assert_reads(again, task, SECOND)
    # What is in the way is named, and everything else goes on.
    for task in (106, 107):
        with pytest.raises(IsADirectoryError, match=rf"{task}\.safetensors"):
            write_again(again, task)
    assert_reads(again, len(kinds) + 1, FIRST)


def write_again(tier: DiskTier, task: int) -> None:
    write = tier.store(task, SECOND.digest, "", SECOND.rows, list(SECOND.pages), lambda file: None)
    finish(tier)
    write.result()


def test_a_directory_that_cannot_be_listed_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def iterdir(path: Path) -> Iterator[Path]:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(Path, "iterdir", iterdir)
    with pytest.raises(ConfigError, match=r"lora_cache_dir: .*Input/output error"):
        DiskTier(tmp_path, 1 << 20, TINY)


def test_what_goes_wrong_on_a_file_s_thread_is_that_file_s(filled: Path, tiers: list[DiskTier]) -> None:
    def fail(path: Path, header: bytes, pages: Sequence[torch.Tensor]) -> None:
        raise MemoryError("a page")

    tiers.append(tier := DiskTier(filled, 1 << 20, TINY, write_file=fail))
    assert not store(tier, 3, FIRST)
    assert_reads(tier, 2, SECOND)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter_file, "content_digest", fail_for_want_of_memory)
        with pytest.raises(OSError, match="Cannot allocate memory"):
            read(tier, 2, len(SECOND.pages))
    assert_reads(tier, 2, SECOND)


def fail_for_want_of_memory(*_: object) -> str:
    raise MemoryError


def test_any_changed_byte_is_noticed(filled: Path, tiers: list[DiskTier]) -> None:
    path = filled / "1.safetensors"
    content = bytearray(path.read_bytes())
    content[-TINY.page_bytes - 5] ^= 1
    path.write_bytes(content)
    tiers.append(tier := DiskTier(filled, 1 << 20, TINY))
    with pytest.raises(DamagedFile, match="digest"):
        read(tier, 1, len(FIRST.pages))
    tier.drop_damaged(1, FIRST.digest, DamagedFile("its digest"))
    assert tier.find(1) is None
    assert_reads(tier, 2, SECOND)
    tiers.pop().close()
    assert not path.exists()
