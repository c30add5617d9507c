"""Files of API keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OPERATORS_KEY, PIRATES_KEY, TENANTS_KEY = "master-ключ-от-всего", "sesame, open yourself", "a tenant's own key"

ENTRIES: tuple[Mapping[str, Any], ...] = (
    {"key": OPERATORS_KEY, "adapters": ["*"], "base_model": True, "operate": True},
    {"key": PIRATES_KEY, "adapters": ["pirate"]},
    {"key": TENANTS_KEY, "tenant": "acme", "adapters": ["poet"], "base_model": True},
)
"""Of those who run the server, of a user of one adapter, and of a tenant."""


def write_keys(path: Path, *entries: Mapping[str, Any]) -> Path:
    path.write_text(json.dumps({"keys": entries}))
    return path
