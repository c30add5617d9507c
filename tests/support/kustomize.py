"""What an overlay's JSON patches (RFC 6902: `add` and `replace`) make of a manifest."""

from __future__ import annotations

import copy
from typing import Any

import yaml

Manifest = dict[str, Any]


def patched(document: Manifest, overlay: Manifest) -> Manifest:
    """The manifest after the patches of an overlay that are for it. A path that leads nowhere raises LookupError."""
    result = copy.deepcopy(document)
    for patch in overlay["patches"]:
        if patch["target"] == {"kind": document["kind"], "name": document["metadata"]["name"]}:
            for change in yaml.safe_load(patch["patch"]):
                _apply(result, **change)
    return result


def _apply(document: Any, op: str, path: str, value: Any) -> None:
    *parents, name = [part.replace("~1", "/") for part in path.split("/")[1:]]
    for parent in parents:
        document = document[int(parent)] if isinstance(document, list) else document[parent]
    if isinstance(document, list) and op == "add":
        document.insert(len(document) if name == "-" else int(name), value)
    else:
        assert (name in document) == (op == "replace"), f"{op} {path}"
        document[name] = value
