"""A repository of the Hub that is written to, through huggingface_hub's public interface.

Every call may be made again: what it asks for is then there already. The package is imported when one is opened.
"""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ckptctl.core.errors import CkptError, Denied, Usage
from ckptctl.remote.refusals import asked, plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

T = TypeVar("T")
MAIN = "main"
_PULLS_LOOKED_AT = 200


@dataclass(frozen=True, slots=True)
class Held:
    """A file that the Hub has: bytes, git's name of its blob, and its content's sha256 ("" for small text)."""

    nbytes: int
    blob: str
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class Tree:
    """What a commit holds, by path."""

    commit: str
    files: dict[str, Held]


@dataclass(frozen=True, slots=True)
class Upload:
    """A file to be sent: bytes, or where they lie; sha256 is their hash in hexadecimal digits."""

    path: str
    content: Path | bytes
    nbytes: int
    sha256: str


class Repository:
    """One repository by name ("owner/name") and kind ("model", "dataset"). Usage for a name that cannot be one."""

    def __init__(self, name: str, kind: str = "model") -> None:
        import huggingface_hub
        from huggingface_hub import constants, errors, hf_api, utils

        from ckptctl import __version__

        self.name, self.kind, self._errors = name, kind, errors
        self._lib: Any = huggingface_hub
        self._utils: Any = utils
        self._file = hf_api.RepoFile
        if constants.HF_HUB_OFFLINE:
            raise CkptError(
                "the Hub is not asked: HF_HUB_OFFLINE is set", where=name, fix="unset it", code="hub-offline"
            )
        try:
            self._utils.validate_repo_id(name)
        except errors.HFValidationError as err:
            raise Usage(f"{name} is no name of a repository", why=plain(str(err)), fix="give OWNER/NAME") from err
        self._api = huggingface_hub.HfApi(library_name="ckptctl", library_version=__version__)
        self._ready: dict[str, Any] = {}
        self.notes: list[str] = []

    @property
    def url(self) -> str:
        """Its address in a browser."""
        return f"{self._api.endpoint}/{'' if self.kind == 'model' else self.kind + 's/'}{self.name}"

    def _ask(self, what: str, ask: Callable[[], T]) -> T:
        with self._quiet():
            return asked(what, self.name, ask)

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """No bars and no log lines of the library; its warnings are kept as notes."""
        utils = self._utils
        shown, level = not utils.are_progress_bars_disabled(), utils.logging.get_verbosity()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            utils.disable_progress_bars()
            utils.logging.set_verbosity(utils.logging.CRITICAL)
            try:
                yield
            finally:
                utils.logging.set_verbosity(level)
                if shown:
                    utils.enable_progress_bars()
                told = (plain(str(w.message)) for w in caught if issubclass(w.category, UserWarning))
                self.notes += [text for text in dict.fromkeys(told) if text not in self.notes]

    # What is there

    def is_private(self) -> bool | None:
        """Whether it is private; None where it is not there, or this user may not see it."""

        def ask() -> bool | None:
            try:
                return bool(self._api.repo_info(self.name, repo_type=self.kind).private)
            except self._errors.RepositoryNotFoundError:
                return None

        return self._ask("looking up the repository", ask)

    def tree(self, revision: str) -> Tree | None:
        """The newest commit of a revision and its files; None where there is no such revision or repository."""

        def ask() -> Tree | None:
            try:
                commit = str(self._api.repo_info(self.name, repo_type=self.kind, revision=revision).sha)
            except (self._errors.RevisionNotFoundError, self._errors.RepositoryNotFoundError):
                return None
            listed = self._api.list_repo_tree(self.name, recursive=True, revision=commit, repo_type=self.kind)
            files = {
                str(e.path): Held(int(e.size), str(e.blob_id), str(e.lfs.sha256) if e.lfs is not None else "")
                for e in listed
                if isinstance(e, self._file)
            }
            return Tree(commit, files)

        return self._ask("listing its files", ask)

    def text(self, path: str, commit: str) -> bytes:
        """A small file's bytes at a commit."""

        def ask() -> bytes:
            return Path(self._api.hf_hub_download(self.name, path, revision=commit, repo_type=self.kind)).read_bytes()

        return self._ask(f"reading {path}", ask)

    # What is changed

    def create(self, *, private: bool) -> None:
        """Have the repository there. CkptError where it is public and should be private."""
        self._require_token()
        there = self.is_private()
        if there is None:
            wanted = True if private else None
            self._ask(
                "making the repository",
                lambda: self._api.create_repo(self.name, repo_type=self.kind, private=wanted, exist_ok=True),
            )
            there = self.is_private()
        if private and there is False:
            raise CkptError(
                "--private: the repository is there, and it is public",
                where=self.name,
                fix="make it private in its settings, or push to another name",
                code="repo-is-public",
            )

    def _require_token(self) -> None:
        if not self._lib.get_token():
            raise Denied(
                "there is no token for the Hub",
                where=self.name,
                fix="log in with `hf auth login`, or set HF_TOKEN",
            )

    def branch(self, name: str) -> None:
        """Have a branch there, made from main where it is new."""
        self._ask(
            f"making the branch {name}",
            lambda: self._api.create_branch(self.name, branch=name, repo_type=self.kind, exist_ok=True),
        )

    def upload(self, files: Sequence[Upload], revision: str, threads: int) -> None:
        """Send the content of large files, as far as the Hub has not got it. They show in no commit yet."""
        operations = [self._operation(f, revision) for f in files]
        self._ask(
            f"sending {files[0].path}" if len(files) == 1 else f"sending {len(files)} files",
            lambda: self._api.preupload_lfs_files(
                self.name,
                operations,
                repo_type=self.kind,
                revision=revision,
                num_threads=threads,
                free_memory=False,
            ),
        )

    def _operation(self, file: Upload, revision: str) -> Any:
        """The library's note of an upload: made once a revision, since it knows what was sent already."""
        key = f"{revision}\0{file.path}\0{file.sha256}"
        if key not in self._ready:
            content = file.content if isinstance(file.content, bytes) else str(file.content)
            made = self._lib.CommitOperationAdd(path_in_repo=file.path, path_or_fileobj=content)
            made.upload_info.sha256 = bytes.fromhex(file.sha256)
            self._ready[key] = made
        return self._ready[key]

    def commit(
        self,
        files: Sequence[Upload],
        deleted: Sequence[str],
        message: str,
        description: str,
        revision: str,
        parent: str,
    ) -> None:
        """One commit, whole or not at all, on top of parent.

        The error of the library where it fails: the caller looks at what is there, and tries again.
        """
        operations = [self._operation(f, revision) for f in files]
        operations += [self._lib.CommitOperationDelete(path_in_repo=p, is_folder=p.endswith("/")) for p in deleted]
        with self._quiet():
            self._api.create_commit(
                self.name,
                operations,
                commit_message=message,
                commit_description=description,
                repo_type=self.kind,
                revision=revision,
                parent_commit=parent,
            )

    # Pull requests

    def find_pull(self, title: str) -> int | None:
        """The number of a pull request by this title that is neither merged nor closed."""

        def ask() -> int | None:
            for count, found in enumerate(self._api.get_repo_discussions(self.name, repo_type=self.kind)):
                if found.is_pull_request and found.title == title and found.status in ("draft", "open"):
                    return int(found.num)
                if count >= _PULLS_LOOKED_AT:
                    break
            return None

        return self._ask("listing pull requests", ask)

    def open_pull(self, title: str, description: str) -> int:
        """The number of a pull request by this title, opened as a draft where there is none."""

        def ask() -> int:
            found = self.find_pull(title)
            if found is not None:
                return found
            made = self._api.create_pull_request(self.name, title, description=description, repo_type=self.kind)
            return int(made.num)

        return self._ask("opening a pull request", ask)

    def show_pull(self, number: int) -> None:
        """Have a pull request open for others to see, no draft any more."""

        def ask() -> None:
            if self._api.get_discussion_details(self.name, number, repo_type=self.kind).status == "draft":
                self._api.change_discussion_status(self.name, number, "open", repo_type=self.kind)

        self._ask("opening the pull request", ask)

    def merge(self, number: int) -> None:
        """Have a pull request merged."""

        def ask() -> None:
            if self._api.get_discussion_details(self.name, number, repo_type=self.kind).status != "merged":
                self._api.merge_pull_request(self.name, number, repo_type=self.kind)

        self._ask("merging the pull request", ask)

    def pull_url(self, number: int) -> str:
        """A pull request's address in a browser."""
        return f"{self.url}/discussions/{number}"
