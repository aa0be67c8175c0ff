"""What huggingface_hub knows: which commit a revision is, its files, their addresses, and who the user is.

The package is imported when an address is opened. A revision is looked up once, and everything is read of its commit.
"""

from __future__ import annotations

import atexit
import os
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import CkptError, Denied, Unrecognised, Unsupported, Usage
from ckptctl.remote.folder import Folder, Listed, is_plain
from ckptctl.remote.ranges import TEMPORARY, Connection, RemoteFile, pause_before, plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ckptctl.remote.address import Address

_TRIES = 5
_MOST_FILES = 200_000
_opened: dict[tuple[str, str, str], Folder] = {}


def place(address: Address) -> Path:
    """Where placeholders for what is at an address lie on this machine, until the process ends.

    Raises Unrecognised where nothing is there, Denied where this user may not read it, CkptError with code
    hub-unreachable, hub-answer or hub-offline.
    """
    hub = _Hub(address)
    pinned = hub.pinned()
    connection = hub.connection(pinned.revision)
    key = (connection.endpoint, connection.headers.get("authorization", ""), str(pinned))
    folder = _opened.get(key)
    if folder is None:
        name = f"{pinned.repo.rpartition('/')[2]}@{pinned.revision}"
        folder = Folder(str(pinned.below("")), name, hub.listed(pinned, connection))
        if not _opened:
            atexit.register(forget)
        _opened[key] = folder
    return Path(folder.root, pinned.path) if pinned.path else Path(folder.root)


def forget() -> None:
    """Remove all placeholders."""
    for folder in _opened.values():
        folder.close()
    _opened.clear()


class _Hub:
    """The Hub for one address."""

    def __init__(self, address: Address) -> None:
        import huggingface_hub
        from huggingface_hub import constants, errors

        self.address, self._errors, self._constants = address, errors, constants
        self.lib = huggingface_hub
        self.utils: Any = import_module("huggingface_hub.utils")
        if constants.HF_HUB_OFFLINE:
            raise self._is_offline()
        from ckptctl import __version__

        self.about: dict[str, Any] = {"library_name": "ckptctl", "library_version": __version__}
        self.api = huggingface_hub.HfApi(**self.about)

    def pinned(self) -> Address:
        """The address at the commit that its revision is now."""
        if self.address.is_pinned:
            return self.address
        wanted = self.address

        def ask() -> str:
            info = self.api.repo_info(wanted.repo, revision=wanted.revision or None, repo_type=wanted.kind)
            return str(info.sha)

        pinned = wanted.at(self._asked(ask))
        if not pinned.is_pinned:
            raise self._unlike(f"the revision is said to be commit {plain(pinned.revision)[:80]!r}")
        return pinned

    def connection(self, commit: str) -> Connection:
        """How its files are asked for."""
        headers = {str(k).lower(): str(v) for k, v in self.utils.build_hf_headers(**self.about).items()}
        return Connection(
            self.api.endpoint,
            headers,
            self.utils.get_session,
            self.failures(),
            float(self._constants.HF_HUB_DOWNLOAD_TIMEOUT),
            commit,
        )

    def failures(self) -> tuple[type[BaseException], ...]:
        """What its client raises where there is no answer: httpx's errors, or those of the httpx it has by now."""
        roots = [c.__module__.partition(".")[0] for c in type(self.utils.get_session()).__mro__]
        http: Any = import_module(next((r for r in roots if r.startswith("httpx")), "httpx"))
        return (http.HTTPError, http.InvalidURL, http.StreamError)

    def listed(self, pinned: Address, connection: Connection) -> Iterator[Listed]:
        """The files at an address and, where it is in a folder, those beside it."""
        for count, entry in enumerate(self._entries(pinned)):
            if count >= _MOST_FILES:
                raise Unsupported(
                    f"there are more than {_MOST_FILES:,} files", where=str(pinned), fix="give the address of a folder"
                )
            name, nbytes, sha256 = self._entry(entry)
            url = self.lib.hf_hub_url(
                pinned.repo, name, repo_type=pinned.kind, revision=pinned.revision, endpoint=self.api.endpoint
            )
            file = RemoteFile(connection, url, str(pinned.below(name)), nbytes, sha256)
            yield Listed(name, nbytes, sha256 or str(entry.blob_id), file, self._cached(pinned, name, nbytes))

    def _entry(self, entry: Any) -> tuple[str, int, str]:
        """(path, bytes, SHA-256 or "") of a listed file."""
        name, nbytes, lfs = entry.path, entry.size, entry.lfs
        if not isinstance(name, str) or not isinstance(nbytes, int) or not is_plain(name):
            raise self._unlike(f"it lists {plain(repr(name))[:200]} of {plain(repr(nbytes))[:40]} bytes")
        return name, nbytes, str(lfs.sha256) if lfs is not None else ""

    def _entries(self, pinned: Address) -> list[Any]:
        """The listed files, from the Hub's tree."""
        if not pinned.path:
            return self._tree(pinned, None, recursive=True)
        parent = pinned.path.rpartition("/")[0]
        beside = self._tree(pinned, parent or None, recursive=False, folders=True)
        here = [e for e in beside if e.path == pinned.path]
        if not here:
            raise Unrecognised(f"nothing is at {pinned}", where=str(self.address), fix="check the path")
        files = [e for e in beside if self._is_file(e)]
        return files if self._is_file(here[0]) else files + self._tree(pinned, pinned.path, recursive=True)

    def _tree(self, pinned: Address, path: str | None, *, recursive: bool, folders: bool = False) -> list[Any]:
        def ask() -> list[Any]:
            found: Iterable[Any] = self.api.list_repo_tree(
                pinned.repo, path, recursive=recursive, revision=pinned.revision, repo_type=pinned.kind
            )
            some = []
            for entry in found:
                if folders or self._is_file(entry):
                    some.append(entry)
                if len(some) > _MOST_FILES:
                    break
            return some

        return list(self._asked(ask))

    def _is_file(self, entry: Any) -> bool:
        return isinstance(entry, self.lib.hf_api.RepoFile)

    def _cached(self, pinned: Address, name: str, nbytes: int) -> str:
        """Where the Hub's cache on this machine has a file of this very commit, "" where it has not."""
        found = self.lib.try_to_load_from_cache(
            pinned.repo, name, revision=pinned.revision, repo_type=None if pinned.kind == "model" else pinned.kind
        )
        try:
            return os.path.realpath(found) if isinstance(found, str) and Path(found).stat().st_size == nbytes else ""
        except OSError:
            return ""

    def _asked(self, ask: Callable[[], Any]) -> Any:
        """What a call of huggingface_hub gives, tried again where that may help; its errors as the user's."""
        for count in range(1, _TRIES + 1):
            try:
                return ask()
            except CkptError:
                raise
            except Exception as err:
                if count == _TRIES or not self._is_temporary(err):
                    raise self._said(err) from err
            time.sleep(pause_before(count))
        raise AssertionError

    def _is_temporary(self, err: Exception) -> bool:
        if isinstance(err, self._errors.HfHubHTTPError):
            return _status(err) in TEMPORARY
        return isinstance(err, self.failures())

    def _said(self, err: Exception) -> CkptError:
        """An error of huggingface_hub, of its client, or of what made something of an answer."""
        errors, where = self._errors, str(self.address)
        if isinstance(err, errors.OfflineModeIsEnabled):
            return self._is_offline()
        if isinstance(err, errors.HfHubHTTPError):
            status = _status(err)
            words = plain(str(getattr(err, "server_message", None) or ""))[:300]
            why = f"status {status}" + (f": {words}" if words else "")
            if status in (401, 403) or isinstance(err, errors.GatedRepoError):
                fix = "check the name; log in with `hf auth login`, or set HF_TOKEN, as a user who may read it"
                return Denied(
                    "there is no such repository, or this user may not read it", where=where, why=why, fix=fix
                )
            if isinstance(err, errors.RevisionNotFoundError):
                return Unrecognised("the repository has no such revision", where=where, why=why, fix="check the name")
            if status == 404:
                fix = "check the name; datasets and spaces are hf://datasets/owner/name and hf://spaces/owner/name"
                return Unrecognised(f"nothing is at {where}", why=why, fix=fix)
            if status in TEMPORARY:
                return self._unreachable(f"{why}, {_TRIES} times")
            return self._unlike(why)
        if isinstance(err, errors.HFValidationError):
            return Usage(f"{where} is no address on the Hub", why=plain(str(err)), code="hub-address")
        if isinstance(err, self.failures()):
            return self._unreachable(f"{type(err).__name__}: {plain(str(err))}")
        return self._unlike(f"{type(err).__name__}: {plain(str(err))[:200]}")

    def _is_offline(self) -> CkptError:
        return CkptError(
            "the Hub is not asked: HF_HUB_OFFLINE is set",
            where=str(self.address),
            fix="unset it, or give the folder of a copy on this machine",
            code="hub-offline",
        )

    def _unreachable(self, why: str) -> CkptError:
        fix = "check the connection, and run again later"
        return CkptError(
            "the Hub could not be asked", where=str(self.address), why=why, fix=fix, code="hub-unreachable"
        )

    def _unlike(self, why: str) -> CkptError:
        return CkptError(
            "the Hub answers with something that is no answer of a Hub",
            where=str(self.address),
            why=why,
            fix="check HF_ENDPOINT and any proxy, and run again",
            code="hub-answer",
        )


def _status(err: Any) -> int:
    """The status of the answer that an error of huggingface_hub is about, 0 where there is none."""
    return int(getattr(getattr(err, "response", None), "status_code", 0) or 0)
