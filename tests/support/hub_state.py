"""What a Hub keeps: repositories, commits, branches, pull requests, and content by hash. No HTTP here.

Every commit holds its whole tree (path to entry): wasteful, and right at the size of a test.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class Refused(Exception):
    """An answer that is no success: status, the words for `X-Error-Message`, the code for `X-Error-Code`."""

    def __init__(self, status: int, words: str, code: str = "") -> None:
        super().__init__(words)
        self.status, self.words, self.code = status, words, code


def blob_id(data: bytes) -> str:
    """The name git gives a file's content."""
    return hashlib.sha1(b"blob " + str(len(data)).encode() + b"\0" + data).hexdigest()


@dataclass(frozen=True)
class Entry:
    """A file of a tree. `sha256` is set where it is in large-file storage; `blob` names content or pointer in git."""

    size: int
    blob: str
    sha256: str = ""

    @property
    def etag(self) -> str:
        return self.sha256 or self.blob

    @property
    def pointer_size(self) -> int:
        return len(pointer(self.sha256, self.size))


def pointer(sha256: str, size: int) -> bytes:
    """The text that git holds in place of a large file. Source: git-lfs, docs/spec.md."""
    lines = ["version https://git-lfs.github.com/spec/v1", f"oid sha256:{sha256}", f"size {size}"]
    return "".join(line + "\n" for line in lines).encode()


@dataclass(frozen=True)
class Commit:
    oid: str
    parent: str | None
    title: str
    text: str
    date: str
    tree: dict[str, Entry]


@dataclass
class Pull:
    number: int
    title: str
    base: str
    status: str = "draft"
    merged_as: str | None = None


@dataclass
class Repo:
    kind: str
    name: str
    private: bool = False
    refs: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)
    pulls: list[Pull] = field(default_factory=list)

    def find(self, revision: str) -> Commit:
        """The commit a branch, tag, pull request or hash names."""
        name = revision.removeprefix("refs/heads/")
        oid = self.refs.get(name) or self.tags.get(name) or revision
        if oid not in self.commits:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self.commits[oid]

    def history(self, revision: str) -> list[Commit]:
        found: list[Commit] = [self.find(revision)]
        while found[-1].parent:
            found.append(self.commits[found[-1].parent])
        return found

    def pull(self, number: int) -> Pull:
        if not 1 <= number <= len(self.pulls):
            raise Refused(404, f"no discussion {number}", "EntryNotFound")
        return self.pulls[number - 1]


class HubState:
    """All repositories of a Hub, and the content of their files in one folder by hash."""

    def __init__(self, folder: Path) -> None:
        self.objects, self.parts = folder / "objects", folder / "parts"
        self.objects.mkdir(parents=True)
        self.parts.mkdir()
        self.lock = threading.RLock()
        self.repos: dict[tuple[str, str], Repo] = {}
        self._clock = itertools.count()

    def content(self, etag: str) -> Path:
        return self.objects / etag

    def store(self, data: bytes) -> Entry:
        """Keeps content that git holds itself."""
        entry = Entry(len(data), blob_id(data))
        self.content(entry.blob).write_bytes(data)
        return entry

    def large(self, sha256: str) -> Entry:
        """The entry of content that was uploaded before."""
        size = self.content(sha256).stat().st_size
        return Entry(size, blob_id(pointer(sha256, size)), sha256)

    def repo(self, kind: str, name: str) -> Repo:
        if (kind, name) not in self.repos:
            raise Refused(404, "Repository not found", "RepoNotFound")
        return self.repos[kind, name]

    def create(self, kind: str, name: str, private: bool) -> Repo:
        with self.lock:
            if (kind, name) in self.repos:
                raise Refused(409, f"You already created this {kind} repo")
            repo = self.repos[kind, name] = Repo(kind, name, private)
            first = {".gitattributes": self.store(b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n")}
            self.commit(repo, "main", "initial commit", "", first, [])
            return repo

    def date(self) -> str:
        """A time of its own for each event, a second apart, so that order shows."""
        minutes, seconds = divmod(next(self._clock), 60)
        return f"2026-01-01T{minutes // 60:02d}:{minutes % 60:02d}:{seconds:02d}.000Z"

    def commit(
        self,
        repo: Repo,
        ref: str,
        title: str,
        text: str,
        added: dict[str, Entry],
        deleted: list[str],
        parent: str | None = None,
    ) -> Commit:
        """One more commit on `ref`, whole or not at all. `parent`: refused (412) where the branch has moved on."""
        with self.lock:
            head = repo.refs.get(ref)
            if parent and head and parent != head:
                raise Refused(412, "A commit has happened since. Please refresh and try again.")
            tree = dict(repo.commits[head].tree) if head else {}
            for path in deleted:
                inside = [name for name in tree if name == path or name.startswith(path.rstrip("/") + "/")]
                if not inside:
                    raise Refused(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
                for name in inside:
                    del tree[name]
            tree.update(added)
            date = self.date()
            oid = hashlib.sha1(repr((repo.kind, repo.name, head, date, sorted(tree))).encode()).hexdigest()
            made = repo.commits[oid] = Commit(oid, head, title, text, date, tree)
            repo.refs[ref] = oid
            return made

    def open_pull(self, repo: Repo, title: str) -> Pull:
        with self.lock:
            pull = Pull(len(repo.pulls) + 1, title, repo.refs["main"])
            repo.pulls.append(pull)
            repo.refs[f"refs/pr/{pull.number}"] = pull.base
            return pull

    def merge(self, repo: Repo, number: int) -> Pull:
        """What the pull request changed, put onto main in one commit; a path that both changed is a conflict."""
        with self.lock:
            pull = repo.pull(number)
            if pull.status in ("merged", "closed"):
                raise Refused(409, f"Pull request is {pull.status}")
            base, head = repo.commits[pull.base].tree, repo.find(f"refs/pr/{number}").tree
            here = repo.find("main").tree
            changed = {path for path in base.keys() | head.keys() if base.get(path) != head.get(path)}
            for path in sorted(changed):
                if here.get(path) not in (base.get(path), head.get(path)):
                    raise Refused(409, f"Merge conflict in {path}")
            added = {path: head[path] for path in changed if path in head}
            deleted = [path for path in changed if path not in head and path in here]
            pull.merged_as = self.commit(repo, "main", pull.title, "", added, deleted).oid
            pull.status = "merged"
            return pull
