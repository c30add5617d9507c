"""`PageStore`: the pages of uploads, so that workers can fetch them from each other."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from multilora_engine.dynamo.fleet_messages import PIECE_BYTES, Upload
from multilora_engine.errors import InvalidRequest


class PageStore:
    """Keeps pages by their digests, `max_bytes` in all: the pages that were not asked for longest go first.

    The bytes of an upload that is on its way count, too.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pages: OrderedDict[str, bytearray] = OrderedDict()
        self._arriving: OrderedDict[str, bytearray] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """The bytes of all kept pages, whole and arriving."""
        return sum(len(pages) for pages in (*self._pages.values(), *self._arriving.values()))

    def __contains__(self, pages_digest: str) -> bool:
        return pages_digest in self._pages

    def get(self, pages_digest: str) -> bytearray | None:
        """The pages, which now go last; None if they are not here."""
        if pages_digest in self._pages:
            self._pages.move_to_end(pages_digest)
        return self._pages.get(pages_digest)

    def put(self, pages_digest: str, pages: bytearray) -> None:
        """Keep pages. Raises InvalidRequest if they are larger than all that may be kept."""
        self._make_room(len(pages))
        self._pages[pages_digest] = pages

    def take_piece(self, upload: Upload, offset: int, piece: bytes) -> bytearray | None:
        """Add the next bytes of an upload. Returns all bytes with the last piece, None before. Offset 0 begins anew.

        Raises InvalidRequest for a piece that is not the next one.
        """
        if offset == 0:
            self._arriving.pop(upload.pages_digest, None)
            self._make_room(upload.num_bytes)
            self._arriving[upload.pages_digest] = bytearray()
        pages = self._arriving.get(upload.pages_digest)
        if pages is None or len(pages) != offset or offset + len(piece) > upload.num_bytes:
            self._arriving.pop(upload.pages_digest, None)
            num_here = "none" if pages is None else len(pages)
            raise InvalidRequest(
                f"bytes {offset} .. {offset + len(piece)} of an adapter of {upload.num_bytes} came when {num_here} "
                "of them were here; send it again"
            )
        pages += piece
        if len(pages) < upload.num_bytes:
            return None
        return self._arriving.pop(upload.pages_digest)

    def _make_room(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise InvalidRequest(
                f"the adapter takes {num_bytes} bytes; adapters that clients send have {self._max_bytes} in all, see "
                "lora_cache_host_memory_bytes"
            )
        while self.num_bytes + num_bytes > self._max_bytes:
            (self._pages or self._arriving).popitem(last=False)


def pieces(pages: bytes | bytearray | memoryview) -> Iterator[tuple[int, bytes]]:
    """The pages as pieces, each with its offset."""
    view = memoryview(pages)
    for offset in range(0, len(view), PIECE_BYTES):
        yield offset, bytes(view[offset : offset + PIECE_BYTES])
