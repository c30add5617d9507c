"""`HubSource`: adapters in repositories of the Hugging Face hub, named like them (`OWNER/NAME`).

Downloads, their resumption, the cache and its directory, the token and the endpoint are huggingface_hub's, with its own
environment variables (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE, ...).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, get_cached_repo_tree, is_offline_mode, snapshot_download
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import ModelInfo
from huggingface_hub.utils.tqdm import disable_progress_bars

from multilora_engine.errors import ConfigError
from multilora_engine.lora.names import is_plain_path
from multilora_engine.lora.sources.source import (
    ALLOWED_FILES,
    GGUF_ENDING,
    AdapterKey,
    LocalAdapter,
    NotThere,
    Unreachable,
    Unusable,
    check_sizes,
    choose_files,
)
from multilora_wire.adapter_use import USE_FILES

_TIMEOUT_S = 10.0

_logger = logging.getLogger(__name__)


class HubSource:
    """Only repositories that one of the operator's patterns allows are asked for, and only files of adapters."""

    def __init__(
        self, repos: Sequence[str], revision: str = "main", endpoint: str | None = None, cache_dir: str | None = None
    ) -> None:
        """repos: `owner/name`, or with wildcards `owner/*`. Raises ConfigError."""
        if isinstance(repos, str) or not repos:
            raise ConfigError('repos is missing; write which repositories may be used, as in "repos": ["acme/*"]')
        self._repos = list(repos)
        self._revision = revision
        self._endpoint = endpoint
        self._cache_dir = cache_dir
        self._api = HfApi(endpoint=endpoint)
        # Progress bars are for terminals; downloads are told in the log.
        disable_progress_bars()

    @contextmanager
    def open(self, key: AdapterKey, max_bytes: int) -> Iterator[LocalAdapter]:
        self._check_allowed(key)
        yield self._fetch(key.name, max_bytes, key.name)

    def covers(self, path: str) -> bool:
        """The names of the repositories that a pattern allows."""
        return path.count("/") == 1 and is_plain_path(path) and self._is_allowed(path)

    @contextmanager
    def open_path(self, path: str, max_bytes: int) -> Iterator[LocalAdapter]:
        yield self._fetch(path, max_bytes, name="")

    def list_keys(self) -> Iterator[AdapterKey]:
        """The hub has too many."""
        return iter(())

    def _check_allowed(self, key: AdapterKey) -> None:
        if "/" not in key.name:
            raise NotThere(f"{str(key)!r} is not the name of a repository, OWNER/NAME")
        if not self._is_allowed(key.name):
            raise NotThere(f"repository {key.name!r} is not allowed, only {', '.join(self._repos)}")

    def _is_allowed(self, repo: str) -> bool:
        return any(fnmatchcase(repo, pattern) for pattern in self._repos)

    def _fetch(self, repo: str, max_bytes: int, name: str) -> LocalAdapter:
        """A repository's files in the local cache, checked. name: the adapter's name."""
        info = self._ask(repo)
        if info is not None:
            _check_files(info, max_bytes)
        snapshot = self._download(repo, is_cached=info is None)
        if info is not None:
            _verify(snapshot, info)
        elif not is_offline_mode():
            self._check_whole(repo)
        # Files of a snapshot are links to the blobs beside it; a link out of the repository's folder is refused.
        return LocalAdapter(snapshot, snapshot.parents[1].resolve(), snapshot.name, name)

    def _ask(self, repo: str) -> ModelInfo | None:
        """The hub's record of a repository; None when the hub cannot be asked, which the cache may make up for."""
        try:
            return self._api.model_info(repo, revision=self._revision, files_metadata=True, timeout=_TIMEOUT_S)
        except GatedRepoError:
            raise Unusable(
                f"access to repository {repo!r} is restricted; give the server a token that has it"
            ) from None
        except RepositoryNotFoundError:
            raise NotThere(f"there is no repository {repo!r}, or the server's token does not open it") from None
        except RevisionNotFoundError:
            raise NotThere(f"repository {repo!r} has no revision {self._revision!r}") from None
        except (httpx2.HTTPError, OSError) as error:
            _logger.warning("the hub cannot be asked about %s (%s), the local cache is", repo, type(error).__name__)
            return None

    def _download(self, repo: str, is_cached: bool) -> Path:
        try:
            return Path(
                snapshot_download(
                    repo,
                    revision=self._revision,
                    allow_patterns=[*ALLOWED_FILES, *USE_FILES],
                    local_files_only=is_cached,
                    endpoint=self._endpoint,
                    cache_dir=self._cache_dir,
                )
            )
        except LocalEntryNotFoundError:
            raise Unreachable(f"the hub cannot be asked, and {repo!r} is not in the local cache") from None
        except (httpx2.HTTPError, OSError) as error:
            raise Unreachable(f"{repo!r} cannot be downloaded: {type(error).__name__}") from error

    def _check_whole(self, repo: str) -> None:
        """Check that the cache has all files of a repository, by the listing that a download of the whole leaves.

        Others download single files: PEFT leaves the chat template out, and the base model's would be taken for it. An
        operator who says HF_HUB_OFFLINE=1 takes the cache for what there is. Raises Unreachable.
        """
        try:
            get_cached_repo_tree(repo, revision=self._revision, cache_dir=self._cache_dir)
        except CachedRepoTreeNotFoundError:
            raise Unreachable(
                f"the hub cannot be asked, and the local cache may have only a part of {repo!r}; "
                "ask again when the hub answers, or run the server with HF_HUB_OFFLINE=1 to take the cache as it is"
            ) from None


def _check_files(info: ModelInfo, max_bytes: int) -> None:
    """Check a repository before anything is downloaded. Raises NotThere or Unusable."""
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    if (name := choose_files(sizes)[0]).endswith(GGUF_ENDING):
        raise Unusable(
            f"{name} is GGUF, which is not downloaded from a hub; put it into a directory source, or upload it"
        )
    check_sizes({name: size for name, size in sizes.items() if name in (*ALLOWED_FILES, *USE_FILES)}, max_bytes)


def _verify(snapshot: Path, info: ModelInfo) -> None:
    """Large files have a SHA-256; the hub's client itself compares sizes only. Raises Unusable or Unreachable."""
    if snapshot.name != info.sha:
        raise Unreachable(f"the revision changed from {info.sha} to {snapshot.name} while it was downloaded")
    for name, expected in _sha256s(info).items():
        path = snapshot / name
        if path.exists():
            with path.open("rb") as file:
                actual = hashlib.file_digest(file, "sha256").hexdigest()
            if actual != expected:
                path.resolve().unlink()
                raise Unusable(f"{name} arrived damaged: its SHA-256 is {actual[:12]}, the hub says {expected[:12]}")


def _sha256s(info: ModelInfo) -> Mapping[str, str]:
    return {file.rfilename: file.lfs.sha256 for file in info.siblings or () if file.lfs is not None}
