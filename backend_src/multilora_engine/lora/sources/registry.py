"""The sources of a configuration: built-in ones by their short names, plug-ins by dotted paths."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, get_type_hints

from pydantic import PydanticUserError, TypeAdapter, ValidationError

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
    for index, spec in enumerate(specs):
        if spec.label in sources:
            raise ConfigError(f"parameter lora_sources: two sources are named {spec.label!r}; give one another name")
        try:
            sources[spec.label] = _build(spec)
        except Exception as error:  # of a plug-in: anything
            kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
            raise ConfigError(f"parameter lora_sources.{index} ({spec.source}): {kind}{error}") from None
    return sources


def _build(spec: SourceSpec) -> AdapterSource:
    source_class = _source_class(spec.source)
    source: AdapterSource = source_class(**_check_options(spec.options, source_class))
    return source


def _check_options(options: Mapping[str, object], source_class: Any) -> Mapping[str, object]:
    """The options, once they are known to be those that the class takes, of its types. Raises ConfigError."""
    parameters = inspect.signature(source_class).parameters
    named = {name: p for name, p in parameters.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    allowed = f"allowed are {', '.join([*SourceSpec.model_fields, *named])}"
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if unknown := [name for name in options if name not in named and not takes_any]:
        raise ConfigError(f"there is no member {unknown[0]!r}; {allowed}")
    types = _type_hints(source_class)
    for name, parameter in named.items():
        if name in options:
            _check_type(name, options[name], types.get(name, Any))
        elif parameter.default is parameter.empty:
            raise ConfigError(f"the member {name!r} is missing; {allowed}")
    return options


def _type_hints(source_class: Any) -> Mapping[str, Any]:
    """The types of a class's parameters; a plug-in may have none, or such that mean nothing at run time."""
    try:
        return get_type_hints(source_class.__init__)
    except (AttributeError, NameError, TypeError):
        return {}


def _check_type(name: str, value: object, kind: Any) -> None:
    try:
        adapter = TypeAdapter(kind)
    except PydanticUserError:
        return  # A type of a plug-in's own, which the plug-in checks.
    try:
        adapter.validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        mistake = error.errors()[0]
        place = ".".join(map(str, [name, *mistake["loc"]]))
        advice = mistake["msg"]
        if mistake["type"] == "list_type" and isinstance(value, str):
            advice = f'write a list, as in "{name}": [{json.dumps(value)}]'
        raise ConfigError(f"{place} is {mistake['input']!r}: {advice}") from None


def _source_class(path: str) -> Any:
    module, separator, name = _BUILT_IN.get(path, path).partition(":")
    if not separator:
        raise ConfigError(f"there is no such source; write {', '.join(_BUILT_IN)} or package.module:Class")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"cannot be imported: {error}") from None
