"""`SourceReader`: reads adapters from the worker's sources, for the whole fleet."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from multilora_engine.config import EngineConfig
from multilora_engine.errors import AdapterNotFound, PathNotCovered
from multilora_wire.layout import AdapterLayout

if TYPE_CHECKING:
    from multilora_engine.lora.layout import PackedAdapter
    from multilora_engine.lora.sources.fetcher import AdapterFetcher


class SourceReader:
    """Reads the sources of the engine for its worker. The other workers get the adapter from this one, by digest.

    The sources are built when the first adapter is read: that imports torch, which takes seconds and 100 MB.
    """

    def __init__(self, config: EngineConfig, layout: AdapterLayout) -> None:
        self._config = config
        self._layout = layout
        self._lock = asyncio.Lock()
        self._fetcher: AdapterFetcher | None = None

    async def read(self, lora_task_id: int, name: str, source: str, path: str) -> PackedAdapter:
        """The adapter at `path`, from the source of that name only, if one is given.

        Raises PathNotCovered where no source covers the path, and the other RequestErrors of a fetch.
        """
        if not self._config.lora.lora_sources:
            raise PathNotCovered(path, [])
        async with self._lock:
            if self._fetcher is None:
                self._fetcher = await asyncio.to_thread(_build, self._config, self._layout)
        from multilora_engine.lora.sources.source import AdapterKey

        fetch = self._fetcher.fetch(AdapterKey(lora_task_id, name), source, path)
        try:
            return (await asyncio.wrap_future(fetch)).packed
        except AdapterNotFound as error:
            raise error.under_name(name) from None

    def close(self) -> None:
        """End the threads of the sources."""
        if self._fetcher is not None:
            self._fetcher.close()


def _build(config: EngineConfig, layout: AdapterLayout) -> AdapterFetcher:
    from multilora_engine.engine.build import build_fetcher

    fetcher = build_fetcher(config, layout)
    assert fetcher is not None, "there are sources"
    return fetcher
