"""`Expectation`: the versions of an adapter that a request or an operator accepts, by their digests."""

from __future__ import annotations

from dataclasses import dataclass

from multilora_engine.errors import AdapterVersionChanged, AdapterVersionNotFound


@dataclass(frozen=True, slots=True)
class Expectation:
    """An empty digest accepts every version.

    answering: the digest of the adapter that answers. replaced: the digest of the version that the name or the task id
        means until then; an adapter that nobody has cached is no such version.
    """

    answering: str = ""
    replaced: str = ""

    def check(self, lora_task_id: object, name: str, present: str, coming: str) -> None:
        """Raises AdapterVersionChanged or AdapterVersionNotFound for versions that are not accepted.

        present: the digest of the cached version, empty without one. coming: the digest of the version after that,
        which is `present` again if none comes.
        """
        if self.replaced not in ("", present):
            raise AdapterVersionChanged(lora_task_id, name, self.replaced, present)
        if self.answering not in ("", coming):
            raise AdapterVersionNotFound(lora_task_id, name, self.answering, coming)


ANY_VERSION = Expectation()
