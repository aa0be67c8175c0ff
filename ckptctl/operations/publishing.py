"""Local files made one with what a repository holds, whole: compared, sent, committed, compared again.

What is there by size and hash is not sent. One commit, or where there are too many files for one, a pull request that
is merged at the end, or, on another branch than main, the files that say what the others mean last.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptctl.core.errors import CkptError
from ckptctl.remote.refusals import wait_or_raise
from ckptctl.remote.repository import MAIN, Held, Repository, Tree, Upload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


COMMIT_FILES = 200
"""Files of one commit. Source: huggingface_hub 2.4.0, _upload_pipeline.py, INITIAL_COMMIT_SIZE_INDEX: 250 at first."""
COMMIT_TEXT_NBYTES = 50 << 20
"""Bytes of one commit's small files, which are sent in its body."""
_BATCH_FILES = 16
_BATCH_NBYTES = 1 << 30
"""What is sent between two looks at what the Hub has got."""
_TEXT_NBYTES = 10_000_000
"""The Hub keeps larger files apart from git, by their sha256; smaller ones may be in git, by its hash."""
_BLOCK = 1 << 22
_LAST = (".index.json", ".metadata", "latest", "latest_universal", "latest_checkpointed_iteration.txt")
_LAST_NAMES = frozenset({"config.json", "README.md", "metadata.json", "common.pt"})


@dataclass(frozen=True, slots=True)
class Local:
    """A file to be had in the repository at path: its bytes, or where they lie."""

    path: str
    content: Path | bytes

    @property
    def nbytes(self) -> int:
        """Its size now."""
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size


@dataclass(frozen=True, slots=True)
class Hashed:
    """A local file with its sha256 and, where git may hold it, git's name of it."""

    local: Local
    nbytes: int
    sha256: str
    blob: str

    @property
    def path(self) -> str:
        """Where it is in the repository."""
        return self.local.path

    def is_held(self, held: Held | None) -> bool:
        """Whether the Hub holds the same bytes."""
        if held is None or held.nbytes != self.nbytes:
            return False
        return self.sha256 == held.sha256 if held.sha256 else self.blob == held.blob


class Sent(NamedTuple):
    """Progress: bytes sent so far, of those that are to be sent."""

    done_nbytes: int
    total_nbytes: int


@dataclass(slots=True)
class Published:
    """What came of it. commits: those that were made; pull: the pull request's number."""

    sent: list[Hashed] = field(default_factory=list)
    there: list[Hashed] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    commits: int = 0
    pull: int | None = None
    commit: str = ""


@dataclass(frozen=True, slots=True)
class Change:
    """What makes a revision hold the local files: what is to be sent, what is there, what goes."""

    tree: Tree
    sent: list[Hashed]
    there: list[Hashed]
    deleted: list[str]

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be done."""
        return not self.sent and not self.deleted


def hashed(files: Sequence[Local], threads: int) -> list[Hashed]:
    """Every file with its hashes. Reads all of them once."""
    with ThreadPoolExecutor(max(1, threads)) as pool:
        return list(pool.map(_hashed, files))


def _hashed(local: Local) -> Hashed:
    nbytes = local.nbytes
    sha256 = hashlib.sha256()
    git = hashlib.sha1(b"blob %d\0" % nbytes, usedforsecurity=False) if nbytes <= _TEXT_NBYTES else None
    if isinstance(local.content, bytes):
        blocks: Any = [local.content]
        _feed(blocks, sha256, git)
    else:
        with local.content.open("rb") as source:
            _feed(iter(lambda: source.read(_BLOCK), b""), sha256, git)
    return Hashed(local, nbytes, sha256.hexdigest(), git.hexdigest() if git else "")


def _feed(blocks: Any, *digests: Any) -> None:
    for block in blocks:
        for digest in digests:
            if digest is not None:
                digest.update(block)


def change(tree: Tree, files: Sequence[Hashed], stale: Callable[[Tree], list[str]] | None = None) -> Change:
    """What makes a tree hold the files, and no longer what stale names of it."""
    sent = [f for f in files if not f.is_held(tree.files.get(f.path))]
    taken = {f.path for f in sent}
    there = [f for f in files if f.path not in taken]
    return Change(tree, sorted(sent, key=_order), there, stale(tree) if stale is not None else [])


def _order(file: Hashed) -> tuple[int, str]:
    """Data first; then the files that say what data mean, pointers to what is whole the very last."""
    name = file.path.rpartition("/")[2]
    if name in _LAST[2:]:
        return 2, file.path
    return int(name.endswith(_LAST[:2]) or name in _LAST_NAMES), file.path


class Publication:
    """One push to one revision of a repository, which is there.

    With as_pull all of it becomes a pull request that is left open; otherwise put() leaves the revision whole.
    """

    def __init__(
        self,
        repository: Repository,
        revision: str,
        message: str,
        *,
        as_pull: bool = False,
        threads: int = 0,
        progress: Callable[[Any], None] | None = None,
    ) -> None:
        self.repository, self.revision, self.message, self.as_pull = repository, revision, message, as_pull
        self.threads, self.progress, self.done = threads or 5, progress, Published()
        self._put: list[Hashed] = []

    def put(
        self, files: Sequence[Hashed], stale: Callable[[Tree], list[str]] | None = None, *, message: str = ""
    ) -> None:
        """Have the files in the revision, or in the pull request."""
        message = message or self.message
        first = change(self._tree(self._ref), files, stale)
        self._put += files
        if first.is_empty:
            self.done.there += first.there
            self.done.commit = first.tree.commit
            return
        many = len(first.sent) + len(first.deleted) > COMMIT_FILES or _text(first.sent) > COMMIT_TEXT_NBYTES
        alone = many and self._ref == MAIN and not self.as_pull
        if (alone or self.as_pull) and self.done.pull is None:
            title = f"{message if alone else self.message} ({_mark(files, first.deleted)})"
            self.done.pull = self.repository.open_pull(title, _DESCRIPTION)
            first = change(self._tree(self._ref), files, stale)
        made = self._made(files, stale, message, first)
        self.done.sent += made.sent
        self.done.there += made.there
        self.done.deleted += made.deleted
        if alone and self.done.pull is not None:
            self._require_held(files, self._tree(self._ref))
            self.repository.show_pull(self.done.pull)
            self.repository.merge(self.done.pull)
            self.done.pull = None
            self._require_held(files, self._tree(self.revision))

    def finish(self) -> Published:
        """Compare everything once more with what the Hub has now; show the pull request where it is to be left open."""
        tree = self._tree(self._ref)
        self._require_held(self._put, tree)
        self.done.commit = tree.commit
        if self.as_pull and self.done.pull is not None:
            self.repository.show_pull(self.done.pull)
        return self.done

    @property
    def _ref(self) -> str:
        return self.revision if self.done.pull is None else f"refs/pr/{self.done.pull}"

    def _tree(self, revision: str) -> Tree:
        tree = self.repository.tree(revision)
        if tree is None:
            what = f"the repository has no revision {revision}"
            raise CkptError(what, where=self.repository.name, fix="see its branches", code="hub-refused")
        return tree

    def _made(
        self, files: Sequence[Hashed], stale: Callable[[Tree], list[str]] | None, message: str, planned: Change
    ) -> Change:
        """Sends and commits until nothing is left to do; a commit whose answer got lost is found done."""
        self._send(planned.sent)
        left, tries = planned, 0
        while not left.is_empty:
            batch = _batch(left.sent)
            deleted = left.deleted if len(batch) == len(left.sent) else []
            before, is_done = len(left.sent) + len(left.deleted), False
            try:
                uploads = [_upload(f) for f in batch]
                self.repository.commit(uploads, deleted, message, _DESCRIPTION, self._ref, left.tree.commit)
                is_done = True
            except Exception as err:
                tries += 1
                wait_or_raise("making the commit", self.repository.name, err, tries)
            left = change(self._tree(self._ref), files, stale)
            if is_done:
                self._require_held(batch, left.tree)
            if len(left.sent) + len(left.deleted) < before:
                self.done.commits += 1
                tries = 0
            elif is_done:
                what = f"the Hub did not delete {left.deleted[0]}"
                raise CkptError(what, where=self.repository.name, fix="delete it by hand", code="hub-differs")
        return planned

    def _send(self, files: Sequence[Hashed]) -> None:
        total, done, batch = sum(f.nbytes for f in files), 0, []
        for number, file in enumerate(files):
            batch.append(file)
            is_last = number + 1 == len(files)
            if is_last or len(batch) == _BATCH_FILES or sum(f.nbytes for f in batch) >= _BATCH_NBYTES:
                self.repository.upload([_upload(f) for f in batch], self._ref, self.threads)
                done += sum(f.nbytes for f in batch)
                batch = []
                if self.progress is not None:
                    self.progress(Sent(done, total))

    def _require_held(self, files: Sequence[Hashed], tree: Tree) -> None:
        wrong = [f for f in files if not f.is_held(tree.files.get(f.path))]
        if wrong:
            raise self._differs(wrong, tree)

    def _differs(self, wrong: Sequence[Hashed], tree: Tree) -> CkptError:
        first = wrong[0]
        held = tree.files.get(first.path)
        why = f"{first.nbytes} bytes with sha256 {first.sha256} here; "
        if held is None:
            why += "the Hub does not list it: a .gitignore there may name it"
        else:
            why += f"{held.nbytes} bytes with {held.sha256 or held.blob} on the Hub"
        return CkptError(
            f"{len(wrong)} files on the Hub are not the ones that were sent: {first.path}",
            where=self.repository.name,
            why=why,
            fix="were the files changed meanwhile? run the same command again",
            code="hub-differs",
        )


_DESCRIPTION = "Pushed by ckptctl."


def _upload(file: Hashed) -> Upload:
    return Upload(file.path, file.local.content, file.nbytes, file.sha256)


def _text(files: Sequence[Hashed]) -> int:
    """Bytes that go into a commit's body, at most: of small files."""
    return sum(f.nbytes for f in files if f.nbytes <= _TEXT_NBYTES and not f.path.endswith(_LARGE))


_LARGE = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".distcp")
"""What a new repository's .gitattributes keeps apart from git whatever its size."""


def _batch(files: Sequence[Hashed]) -> list[Hashed]:
    """The next commit's files, in order."""
    out: list[Hashed] = []
    for file in files:
        if out and (len(out) == COMMIT_FILES or _text([*out, file]) > COMMIT_TEXT_NBYTES):
            break
        out.append(file)
    return out


def _mark(files: Sequence[Hashed], deleted: Sequence[str]) -> str:
    """A short name of what is pushed: an interrupted push finds its pull request by it."""
    text = "\n".join([*(f"{f.path} {f.sha256}" for f in files), *deleted])
    return hashlib.sha256(text.encode()).hexdigest()[:10]
