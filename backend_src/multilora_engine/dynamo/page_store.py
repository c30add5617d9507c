"""`PageStore`: the pages of uploads, so that workers can fetch them from each other."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from multilora_engine.dynamo.fleet_messages import PIECE_BYTES, Upload
from multilora_engine.errors import InvalidRequest

_WHOLE, _ARRIVING = True, False
_Key = tuple[str, bool]


class PageStore:
    """Keeps pages by their digests, `max_bytes` in all: the pages that were not asked for longest go first.

    The bytes of an upload that is on its way count, too.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[_Key, bytearray] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """The bytes of all kept pages, whole and arriving."""
        return sum(map(len, self._kept.values()))

    def __contains__(self, pages_digest: str) -> bool:
        return (pages_digest, _WHOLE) in self._kept

    def get(self, pages_digest: str) -> bytearray | None:
        """The pages, which now go last; None if they are not here."""
        return self._touch((pages_digest, _WHOLE))

    def put(self, pages_digest: str, pages: bytearray) -> None:
        """Keep pages. Raises InvalidRequest if they are larger than all that may be kept."""
        self._check_size(len(pages))
        self._kept.pop((pages_digest, _WHOLE), None)
        self._make_room(len(pages))
        self._kept[pages_digest, _WHOLE] = pages

    def take_piece(self, upload: Upload, offset: int, piece: bytes) -> bytearray | None:
        """Add the next bytes of an upload. Returns all bytes with the last piece, None before. Offset 0 begins anew.

        Raises InvalidRequest for a piece that is not the next one.
        """
        self._check_size(upload.num_bytes)
        key = (upload.pages_digest, _ARRIVING)
        if offset == 0:
            self._kept[key] = bytearray()
        pages = self._touch(key)
        if pages is None or len(pages) != offset or offset + len(piece) > upload.num_bytes:
            self._kept.pop(key, None)
            num_here = "none" if pages is None else len(pages)
            raise InvalidRequest(
                f"bytes {offset} .. {offset + len(piece)} of an adapter of {upload.num_bytes} came when {num_here} "
                "of them were here; send it again"
            )
        self._make_room(len(piece))  # These pages stay: they were touched last, and fit.
        pages += piece
        if len(pages) < upload.num_bytes:
            return None
        return self._kept.pop(key)

    def _touch(self, key: _Key) -> bytearray | None:
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise InvalidRequest(
                f"the adapter takes {num_bytes} bytes; adapters that clients send have {self._max_bytes} in all, see "
                "lora_cache_host_memory_bytes"
            )

    def _make_room(self, num_bytes: int) -> None:
        while self.num_bytes + num_bytes > self._max_bytes:
            self._kept.popitem(last=False)


def pieces(pages: bytes | bytearray | memoryview) -> Iterator[tuple[int, bytes]]:
    """The pages as pieces, each with its offset."""
    view = memoryview(pages)
    for offset in range(0, len(view), PIECE_BYTES):
        yield offset, bytes(view[offset : offset + PIECE_BYTES])
