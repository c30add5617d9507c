"""The directory source: it finds the adapters of its directory, and nothing outside of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.adapters import TINY, wire_adapter
from support.sources import MAX_BYTES, NO_BASE, ROWS, digest_of, key, peft_files, save_adapter

from multilora_engine.errors import ConfigError, InvalidRequest
from multilora_engine.lora.names import task_id_of
from multilora_engine.lora.sources.directory import DirectorySource
from multilora_engine.lora.sources.packing import pack_directory
from multilora_engine.lora.sources.source import AdapterKey, NotThere, SourceError, Unreachable, Unusable
from multilora_wire.converted_files import read_rows


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with one adapter, `pirate`, and one that must never be read outside of it."""
    save_adapter(tmp_path / "secret", seed=66)
    save_adapter(tmp_path / "root" / "pirate", seed=1)
    return tmp_path / "root"


def fetch(root: Path, wanted: AdapterKey, max_bytes: int = MAX_BYTES) -> tuple[str, str]:
    """(name, digest) of an adapter as the source gives it."""
    with DirectorySource(str(root)).open(wanted, max_bytes) as adapter:
        return adapter.name, pack_directory(adapter, TINY, NO_BASE).digest


def test_an_adapter_is_found_by_its_name_and_by_its_id(root: Path) -> None:
    save_adapter(root / "acme" / "parrot.v2", seed=2)
    save_adapter(root / "7", seed=3)
    assert fetch(root, key("pirate")) == ("pirate", digest_of(1))
    assert fetch(root, key("acme/parrot.v2")) == ("acme/parrot.v2", digest_of(2))
    assert fetch(root, AdapterKey(task_id_of("acme/parrot.v2"))) == ("acme/parrot.v2", digest_of(2))
    assert fetch(root, AdapterKey(7)) == ("", digest_of(3))


def test_ids_that_no_folder_has_do_not_make_it_read_all_names_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, reads = DirectorySource(str(root)), []
    list_keys = source.list_keys
    monkeypatch.setattr(source, "list_keys", lambda: reads.append(1) or list_keys())
    for wanted in (404, 405, 406):
        with pytest.raises(NotThere), source.open(AdapterKey(wanted), MAX_BYTES):
            pass
    with source.open(AdapterKey(task_id_of("pirate")), MAX_BYTES) as adapter:
        assert adapter.name == "pirate"
    assert len(reads) == 1


def test_a_converted_adapter_is_an_adapter_too(root: Path) -> None:
    wire = wire_adapter(TINY, ROWS, seed=4)
    (root / "converted").mkdir()
    np.save(root / "converted" / "model.lora_weights.npy", wire.weights.numpy()[np.newaxis])
    np.save(root / "converted" / "model.lora_config.npy", wire.config.numpy()[np.newaxis])
    assert fetch(root, key("converted")) == ("converted", digest_of(4))


def test_the_adapters_of_a_directory_are_listed(root: Path) -> None:
    for name in ("acme/parrot", "7", "not plain", "07", "٣"):
        save_adapter(root / name, seed=5)
    (root / "empty").mkdir()
    (root / "file").write_text("")
    listed = set(DirectorySource(str(root)).list_keys())
    assert listed == {key("pirate"), key("acme/parrot"), key("07"), AdapterKey(7)}


def test_an_entry_that_cannot_be_looked_at_hides_no_other(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(DirectorySource(str(root)).list_keys())
    (root / "loop").symlink_to("loop")
    closed = root / "closed"
    closed.mkdir()
    is_file = Path.is_file

    def look(path: Path) -> bool:
        if path.parent == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", look)
    assert set(DirectorySource(str(root)).list_keys()) == before


def test_a_link_inside_the_directory_is_followed(root: Path) -> None:
    (root / "alias").symlink_to("pirate")
    assert fetch(root, key("alias")) == ("alias", digest_of(1))


@pytest.mark.parametrize("wanted", [key("nobody"), key("acme/nobody"), AdapterKey(404), key("pirate/nobody")])
def test_what_is_not_there_is_not_there(root: Path, wanted: AdapterKey) -> None:
    with pytest.raises(NotThere):
        fetch(root, wanted)


@pytest.mark.parametrize("name", ["../secret", "pirate/../../secret", "/etc", "a/b/c", "..", ".", "pirate\n", "a//b"])
def test_names_that_lead_elsewhere_do_not_even_reach_a_source(name: str) -> None:
    with pytest.raises(InvalidRequest, match="is not plain"):
        key(name)


def test_a_name_never_stands_for_another_id() -> None:
    with pytest.raises(InvalidRequest, match=f"lora_name 'pirate' is LoRA task {task_id_of('pirate')}, not 7"):
        AdapterKey(7, "pirate")


def _link_of_folder(root: Path) -> None:
    (root / "bad").rmdir()
    (root / "bad").symlink_to(root.parent / "secret")


def _link_of_file(root: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (root / "bad" / name).symlink_to(root.parent / "secret" / name)


def _loop(root: Path) -> None:
    (root / "bad").rmdir()
    (root / "bad").symlink_to("bad")


def _fifo(root: Path) -> None:
    (root / "bad" / "adapter_config.json").write_text("{}")
    os.mkfifo(root / "bad" / "adapter_model.safetensors")


def _pickle(root: Path) -> None:
    (root / "bad" / "adapter_config.json").write_text("{}")
    (root / "bad" / "adapter_model.bin").write_bytes(b"cos\nsystem\n")


def _half(root: Path) -> None:
    (root / "bad" / "adapter_config.json").write_text("{}")


def _large(root: Path) -> None:
    (root / "bad" / "adapter_config.json").write_text("{}")
    with (root / "bad" / "adapter_model.safetensors").open("wb") as file:
        file.truncate(MAX_BYTES)


def _large_config(root: Path) -> None:
    (root / "bad" / "adapter_config.json").write_text(" " * (MAX_BYTES + 1))
    (root / "bad" / "adapter_model.safetensors").write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_link_of_folder, "bad is a link out of the source's directory"),
        (_link_of_file, "adapter_config.json is a link out of the source's directory"),
        (_loop, "bad cannot be opened"),
        (_fifo, "adapter_model.safetensors is not a file"),
        (_pickle, "adapter_model.bin is a pickle"),
        (_half, "it has adapter_config.json alone"),
        (_large, f"it has {MAX_BYTES + 2} bytes, more than the {MAX_BYTES}"),
        (_large_config, "adapter_config.json has 1048577 bytes"),
    ],
)
def test_what_is_refused_is_named_and_hurts_no_other(root: Path, damage: Callable[[Path], None], reason: str) -> None:
    (root / "bad").mkdir()
    damage(root)
    with pytest.raises(SourceError, match=reason) as caught:
        fetch(root, key("bad"))
    assert isinstance(caught.value, Unusable)
    assert str(root) not in str(caught.value)
    assert fetch(root, key("pirate")) == ("pirate", digest_of(1))


@pytest.mark.parametrize("bad", ["adapters", "", "/nowhere"])
def test_a_root_that_is_no_absolute_directory_refuses_to_load(bad: str) -> None:
    with pytest.raises(ConfigError, match="write the absolute path of a directory"):
        DirectorySource(bad)


def fetch_path(root: Path, path: object) -> str:
    """Digest of what is at a path."""
    source = DirectorySource(str(root))
    assert source.covers(str(path))
    with source.open_path(str(path), MAX_BYTES) as adapter:
        assert adapter.name == ""
        return pack_directory(adapter, TINY, NO_BASE).digest


def test_an_adapter_is_found_by_its_path_however_deep_and_whatever_it_is_called(root: Path, tmp_path: Path) -> None:
    save_adapter(root / "team" / "2026" / "run no. 3", seed=3)
    (tmp_path / "link").symlink_to(root)
    assert fetch_path(root, root / "pirate") == digest_of(1)
    assert fetch_path(root, root / "team" / "2026" / "run no. 3") == digest_of(3)
    assert fetch_path(tmp_path / "link", tmp_path / "link" / "pirate") == digest_of(1)
    assert fetch_path(tmp_path / "link", root / "pirate") == digest_of(1)


@pytest.mark.parametrize(
    "path", ["{out}/secret", "{root}/../secret", "{root}-2", "pirate", "", "/", "~/x", "{root}/\0", "{root}/x/.."]
)
def test_a_path_that_is_not_below_the_root_is_not_covered(root: Path, tmp_path: Path, path: str) -> None:
    assert not DirectorySource(str(root)).covers(path.format(root=root, out=tmp_path))


def test_a_path_that_leads_out_by_a_link_is_refused_and_one_to_nothing_is_not_there(root: Path, tmp_path: Path) -> None:
    (root / "innocent").symlink_to(tmp_path / "secret")
    with pytest.raises(Unusable, match="innocent is a link out of the source's directory"):
        fetch_path(root, root / "innocent")
    with pytest.raises(NotThere, match="no such folder"):
        fetch_path(root, root / "nobody")


def test_an_adapter_that_changes_while_it_is_read_is_none(root: Path) -> None:
    source = DirectorySource(str(root))
    with pytest.raises(Unreachable, match="changed while"), source.open(key("pirate"), MAX_BYTES) as adapter:
        (adapter.directory / "adapter_model.safetensors").write_bytes(b"the next version")
    save_adapter(root / "parrot", seed=2)
    save_adapter(root / "other", seed=3, r=8)
    with pytest.raises(Unreachable, match="changed"), source.open(key("parrot"), MAX_BYTES) as adapter:
        os.replace(root / "other" / "adapter_config.json", adapter.directory / "adapter_config.json")


def test_a_folder_with_two_adapters_is_refused(root: Path) -> None:
    np.save(root / "pirate" / "model.lora_weights.npy", np.zeros((1, 2, 3), np.float32))
    with pytest.raises(Unusable, match=r"adapter_model\.safetensors and model\.lora_weights\.npy, which may differ"):
        fetch(root, key("pirate"))


def test_converted_files_that_are_truncated_while_they_are_read_end_no_process(root: Path) -> None:
    """A mapped file would: the kernel ends whoever reads after its end."""
    wire = wire_adapter(TINY, ROWS, seed=4)
    folder = root / "converted"
    folder.mkdir()
    np.save(folder / "model.lora_config.npy", wire.config.numpy())
    np.save(folder / "model.lora_weights.npy", wire.weights.numpy())
    weights, config = read_rows(folder)
    (folder / "model.lora_weights.npy").write_bytes(b"")
    assert np.isfinite(weights).all()
    assert len(config) == len(ROWS)


class Watched:
    """A watched root whose folders have been seen at rest. Each scan stands for one more interval."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.source = DirectorySource(str(root), watch=True)
        assert not [change for _ in range(2) for change in self.source.scan() if change.changed_s is None]
        self.num_writes = 0

    def rest(self) -> list[tuple[str, str]]:
        """What two scans tell while nothing changes."""
        return [(str(c.key), c.reason) for _ in range(2) for c in self.source.scan()]

    def write(self, folder: str, file: str, seed: int, num_bytes: int | None = None) -> None:
        """Write a file in place, at a time of its own, as the clock of a file system may be coarse."""
        self.num_writes += 1
        path = self.root / folder / file
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(peft_files(wire_adapter(TINY, ROWS, seed=seed))[file][:num_bytes])
        os.utime(path, (self.num_writes, self.num_writes))

    def digest(self, name: str) -> str:
        with self.source.open(key(name), MAX_BYTES) as adapter:
            return pack_directory(adapter, TINY, NO_BASE).digest


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def test_a_watched_directory_tells_new_folders_and_folders_that_were_exchanged(root: Path, tmp_path: Path) -> None:
    watched = Watched(root)
    save_adapter(root / "acme" / "new", seed=2)
    assert watched.source.scan() == [], "it may still grow"
    assert watched.rest() == [("acme/new", "")]
    (root / "pirate").rename(tmp_path / "old")
    save_adapter(tmp_path / "next", seed=3).rename(root / "pirate")
    assert watched.digest("pirate") == digest_of(3), "a renamed folder is whole at once"
    assert watched.rest() == [("pirate", "")]
    (root / "pirate").rename(tmp_path / "old3")
    assert watched.rest() == []
    (tmp_path / "old").rename(root / "pirate")
    assert watched.rest() == [("pirate", "")], "an older version is a change, too"
    assert watched.rest() == []


def test_a_link_that_is_turned_exchanges_a_folder(root: Path) -> None:
    (root / "versions").mkdir()
    for seed in (5, 6):
        save_adapter(root / "versions" / f"v{seed}", seed=seed)
    (root / "latest").symlink_to("versions/v5")
    watched = Watched(root)
    (root / "turned").symlink_to("versions/v6")
    (root / "turned").replace(root / "latest")
    assert watched.rest() == [("latest", "")]
    assert watched.digest("latest") == digest_of(6)


@pytest.mark.parametrize("order", [(CONFIG, WEIGHTS), (WEIGHTS, CONFIG)])
def test_no_old_file_is_read_with_a_new_one(root: Path, order: tuple[str, str]) -> None:
    watched = Watched(root)
    first, second = order
    watched.write("pirate", first, seed=2)
    with pytest.raises(Unreachable, match=f"as before: {second}"):
        watched.digest("pirate")
    assert watched.rest() == [("pirate", f"{second} as before, other files new; exchange the whole folder")]
    assert watched.rest() == [], "it is told once"
    with pytest.raises(Unreachable), watched.source.open_path(str(root / "pirate"), MAX_BYTES):
        pass
    watched.write("pirate", second, seed=2)
    assert watched.rest() == [("pirate", "")]
    assert watched.digest("pirate") == digest_of(2)


def test_half_a_folder_is_told_once_and_looked_at_again(root: Path) -> None:
    watched = Watched(root)
    watched.write("half", CONFIG, seed=2)
    assert [name for name, reason in watched.rest() if "alone" in reason] == ["half"]
    for num_bytes in (4, 100, 1000):
        watched.write("half", WEIGHTS, seed=2, num_bytes=num_bytes)
        assert watched.rest() == [("half", f"{WEIGHTS} is not whole: SafetensorError")]
        assert watched.rest() == []
    for num_bytes in (1001, 1002, 1003):
        watched.write("half", WEIGHTS, seed=2, num_bytes=num_bytes)
        assert watched.source.scan() == [], "a folder that grows is not told"
    watched.write("half", WEIGHTS, seed=2)
    assert watched.rest() == [("half", "")]
    assert watched.digest("half") == digest_of(2)


@pytest.mark.parametrize("num_bytes", [None, 200])
def test_half_a_folder_at_the_start_is_told_and_a_whole_one_is_not(root: Path, num_bytes: int | None) -> None:
    data = peft_files(wire_adapter(TINY, ROWS, seed=2))[WEIGHTS]
    (root / "pirate" / WEIGHTS).write_bytes(data[:num_bytes])
    source = DirectorySource(str(root), watch=True)
    (told,) = (change for _ in range(3) for change in source.scan())
    assert bool(told.reason) == (num_bytes is not None)
    assert told.changed_s is not None
    assert told.changed_s <= time.time()


def past(directory: Path) -> float:
    """A time of the file system's clock that all changes until now have at most, and later ones do not have."""
    probe = directory / "probe"
    probe.touch()
    before_s = probe.stat().st_ctime
    while probe.stat().st_ctime == before_s:
        os.utime(probe)
    return before_s


@pytest.mark.parametrize("change", ["nothing", "rename", "write", "turn a link", "turn the root"])
def test_a_folder_that_is_there_at_the_start_tells_when_it_was_changed_whatever_its_files_times(
    root: Path, tmp_path: Path, change: str
) -> None:
    (tmp_path / "versions").mkdir()
    for seed in (5, 6):
        save_adapter(tmp_path / "versions" / f"v{seed}" / "latest", seed=seed)
    save_adapter(root / "versions" / "v6", seed=6)
    save_adapter(tmp_path / "next", seed=7)
    (root / "latest").symlink_to("versions/v6")
    (tmp_path / "current").symlink_to("versions/v5")
    for file in tmp_path.rglob("*.*"):
        os.utime(file, (1, 1))
    before_s = past(tmp_path)
    name = "pirate" if change in ("rename", "write") else "latest"
    if change == "rename":
        (root / name).rename(tmp_path / "old")
        (tmp_path / "next").rename(root / name)
    elif change == "write":
        content = (root / name / WEIGHTS).read_bytes()
        (root / name / WEIGHTS).write_bytes(content)
        os.utime(root / name / WEIGHTS, (1, 1))
    elif change == "turn a link":
        (root / "turned").symlink_to("versions/v6")
        (root / "turned").replace(root / "latest")
    elif change == "turn the root":
        (tmp_path / "turned").symlink_to("versions/v6")
        (tmp_path / "turned").replace(tmp_path / "current")
    source = DirectorySource(str(tmp_path / "current" if change == "turn the root" else root), watch=True)
    (told,) = (one for _ in range(2) for one in source.scan() if str(one.key) == name)
    assert told.changed_s is not None
    assert (told.changed_s > before_s) == (change != "nothing")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["config", "weights", "part", "swap", "scan", "rest"]), max_size=14))
def test_however_a_folder_changes_what_is_read_is_one_version(steps: list[str]) -> None:
    """The model: versions have numbers, and a whole folder is one whose two files have the same.

    A version that is written in place begins after the one before has come to rest.
    """
    with TemporaryDirectory() as directory:
        root = Path(directory) / "root"
        save_adapter(root / "x", seed=1, base_model_name_or_path="version-1")
        watched = Watched(root)
        versions, is_at_rest = {CONFIG: 1, WEIGHTS: 1}, True
        for number, step in enumerate(steps):
            # A version ends when both of its files are there: the next file is of the next one.
            version = max(versions.values()) + (versions[CONFIG] == versions[WEIGHTS])
            is_whole = versions[CONFIG] == versions[WEIGHTS]
            if step in ("config", "weights", "part"):
                if is_whole and not is_at_rest:
                    continue
                is_at_rest = False
                file = CONFIG if step == "config" else WEIGHTS
                watched.write("x", file, version, 50 if step == "part" else None)
                versions[file] = version if step != "part" else 0
            elif step == "swap":
                (root / "x").rename(Path(directory) / f"old{number}")
                save_adapter(root / "x", seed=version)
                versions, is_at_rest = {CONFIG: version, WEIGHTS: version}, False
            else:
                told = watched.rest() if step == "rest" else []
                if step == "scan":
                    watched.source.scan()
                is_at_rest = step == "rest"
                assert is_whole or all(reason for _, reason in told)
            try:
                digest = watched.digest("x")
            except (Unreachable, Unusable):
                continue
            assert digest == digest_of(versions[WEIGHTS])
            assert versions[CONFIG] == versions[WEIGHTS]
