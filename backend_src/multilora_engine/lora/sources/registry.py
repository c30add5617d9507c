"""The sources of a configuration: built-in ones by their short names, plug-ins by dotted paths."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from multilora_engine.errors import ConfigError
from multilora_engine.lora.sources.source import AdapterSource
from multilora_engine.lora_config import SourceSpec

_BUILT_IN = {
    "directory": "multilora_engine.lora.sources.directory:DirectorySource",
    "huggingface": "multilora_engine.lora.sources.hub:HubSource",
    "fsspec": "multilora_engine.lora.sources.object_store:ObjectStoreSource",
}
"""Imported when a configuration names them: only a source's users need its packages, and pay for their import."""


def build_sources(specs: Sequence[SourceSpec]) -> dict[str, AdapterSource]:
    """The sources by their names, in order. Raises ConfigError, naming the source and its mistake."""
    sources: dict[str, AdapterSource] = {}
    for spec in specs:
        if spec.label in sources:
            raise ConfigError(f"parameter lora_sources: two sources are named {spec.label!r}; give one another name")
        sources[spec.label] = _build(spec)
    return sources


def _build(spec: SourceSpec) -> AdapterSource:
    try:
        source: AdapterSource = _source_class(spec.source)(**spec.options)
        return source
    except (ConfigError, TypeError, ValueError) as error:
        raise ConfigError(f"parameter lora_sources: {spec.source}: {error}") from None


def _source_class(path: str) -> Any:
    module, separator, name = _BUILT_IN.get(path, path).partition(":")
    if not separator:
        raise ConfigError(f"there is no such source; write {', '.join(_BUILT_IN)} or package.module:Class")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"cannot be imported: {error}") from None
