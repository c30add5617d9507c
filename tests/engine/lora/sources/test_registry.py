"""`lora_sources`: entries that become sources, and entries that stop the load, with a message on what to write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from multilora_engine.config import EngineConfig
from multilora_engine.errors import ConfigError
from multilora_engine.lora.sources.directory import DirectorySource
from multilora_engine.lora.sources.hub import HubSource
from multilora_engine.lora.sources.object_store import ObjectStoreSource
from multilora_engine.lora.sources.registry import build_sources


def build(tmp_path: Path, sources: object) -> dict[str, object]:
    (tmp_path / "config.json").write_text("{}")
    text = sources if isinstance(sources, str) else json.dumps(sources)
    config = EngineConfig.from_parameters({"model_path": str(tmp_path), "lora_sources": text}, environ={})
    return dict(build_sources(config.lora.lora_sources))


def test_sources_are_built_in_order_by_short_names_and_dotted_paths(tmp_path: Path) -> None:
    sources = build(
        tmp_path,
        [
            {"source": "huggingface", "repos": ["acme/*"]},
            {"source": "directory", "name": "ours", "root": str(tmp_path)},
            {"source": "fsspec", "urls": ["memory://adapters"]},
            {"source": "support.sources:GivenSource", "name": "plug-in", "folders": {"x": "/x"}},
        ],
    )
    assert list(sources) == ["huggingface", "ours", "fsspec", "plug-in"]
    kinds = [type(source) for source in sources.values()]
    assert kinds[:3] == [HubSource, DirectorySource, ObjectStoreSource]
    assert vars(sources["plug-in"])["folders"] == {"x": "/x"}


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ("directory", r'lora_sources=.*not JSON .*write a list like \[\{"source": "directory"'),
        ({}, r"lora_sources=.*: not a list; write one like \[\{\"source\""),
        ("null", "lora_sources=.*: not a list; write one like"),
        ("[" * 100_000, "lora_sources=.*: not JSON"),
        (["directory"], r"lora_sources=.*: entry 0 is 'directory'; write an object as in \[\{\"source\""),
        ([{}], 'lora_sources=.*: entry 0 has no member "source"; write an object'),
        ([{"source": "directory", "root": "/"}, {"root": "/"}], 'entry 1 has no member "source"'),
        ([{"source": 5}], "lora_sources.0.source=5: Input should be a valid string"),
        ([{"source": "directory", "name": None}], "lora_sources.0.name=None: Input should be a valid string"),
        (
            [{"source": "dropbox"}],
            r"lora_sources.0 \(dropbox\): there is no such source; write directory, huggingface, fsspec or package",
        ),
        ([{"source": "support.nowhere:Store"}], r"\(support.nowhere:Store\): cannot be imported: No module named"),
        ([{"source": "support.sources:Nothing"}], "cannot be imported: .* has no attribute 'Nothing'"),
        (
            [{"source": "directory"}],
            r"\(directory\): the member 'root' is missing; allowed are source, name, root, watch$",
        ),
        (
            [{"source": "huggingface", "repos": ["a/*"]}, {"source": "directory", "rot": "/x"}],
            r"parameter lora_sources.1 \(directory\): there is no member 'rot'; allowed are source, name, root, watch$",
        ),
        (
            [{"source": "huggingface", "repo": ["a/b"]}],
            "no member 'repo'; allowed are source, name, repos, revision, endpoint, cache_dir$",
        ),
        (
            [{"source": "fsspec", "url": "s3://a"}],
            "no member 'url'; allowed are source, name, urls, options, download_dir$",
        ),
        (
            [{"source": "support.sources:GivenSource", "folder": {}}],
            "no member 'folder'; allowed are source, name, folders",
        ),
        (
            [{"source": "support.sources:GivenSource", "folders": 3}],
            "folders is 3: Input should be an object",
        ),
        ([{"source": "os:getcwd", "root": "/"}], r"\(os:getcwd\): "),
        ([{"source": "fractions:Fraction", "numerator": [1]}], r"\(fractions:Fraction\): TypeError: "),
        ([{"source": "directory", "root": 5}], "root is 5: Input should be a valid string"),
        ([{"source": "directory", "root": None}], "root is None: Input should be a valid string"),
        ([{"source": "directory", "root": "a\0b"}], "write the absolute path of a directory"),
        ([{"source": "huggingface", "repos": ["a/*", 5]}], "repos.1 is 5: Input should be a valid string"),
        ([{"source": "huggingface", "repos": ["a/*"], "revision": 7}], "revision is 7: Input should be a valid string"),
        (
            [{"source": "huggingface", "repos": ["a/*"], "endpoint": []}],
            r"endpoint is \[\]: Input should be a valid str",
        ),
        ([{"source": "fsspec", "urls": [5]}], "urls.0 is 5: Input should be a valid string"),
        (
            [{"source": "fsspec", "urls": ["memory://a"], "options": "x"}],
            "options is 'x': Input should be an object",
        ),
        (
            [{"source": "fsspec", "urls": ["memory://a"], "download_dir": 1}],
            "download_dir is 1: Input should be a valid",
        ),
        ([{"source": "directory", "root": "/nowhere"}], "write the absolute path of a directory"),
        ([{"source": "directory", "root": "/"}] * 2, "two sources are named 'directory'; give one another name"),
        ([{"source": "huggingface", "repos": []}], 'write which repositories may be used, as in "repos"'),
        ([{"source": "huggingface", "repos": "acme/*"}], 'as in "repos": \\["acme/\\*"\\]'),
        ([{"source": "fsspec", "urls": []}], 'as in "urls"'),
        ([{"source": "fsspec", "urls": ["/adapters"]}], "'/adapters' is not a plain URL; write one like s3://"),
        ([{"source": "fsspec", "urls": ["simplecache::s3://a/b"]}], "is not a plain URL"),
        ([{"source": "fsspec", "urls": ["warp://a"]}], "warp://a: .*"),
        ([{"source": "fsspec", "urls": ["s3://a/b"]}], r"s3://a/b needs a package .* multilora-engine\[s3\]"),
    ],
)
def test_what_cannot_be_a_source_stops_the_load_and_says_what_to_write(
    tmp_path: Path, sources: object, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(tmp_path, sources)


def test_a_source_is_imported_when_a_configuration_names_it(tmp_path: Path) -> None:
    given = json.dumps([{"source": "directory", "root": str(tmp_path)}])
    script = f"""
import sys
from multilora_engine.lora_config import SourceSpec
from multilora_engine.lora.sources.registry import build_sources
build_sources([SourceSpec(**spec) for spec in {given}])
print(*sys.modules)
"""
    modules = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert "multilora_engine.lora.sources.directory" in modules
    assert {"huggingface_hub", "fsspec"}.isdisjoint(modules)
