"""Where a result is made and how it gets its name.

A hidden sibling of the target, a lock, the space it needs, and the rename at the end.

.NAME.ckptctl-partial/journal.jsonl     what is done; locked by the job that runs
.NAME.ckptctl-partial/out/NAME          the file or folder in the making
.NAME.ckptctl-partial/scratch/          decoded members
.NAME.ckptctl-old/                      on its way to be removed
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from ckptctl.core.errors import CkptError, NoSpace, Unsafe, Usage
from ckptctl.execute.system import EXCHANGE, NOREPLACE, allocate, rename, writing_failed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ckptctl.core.output import OutputFile


def require_apart(target: Path, root: Path, files: Iterable[Path]) -> None:
    """Usage where target is the source, lies in it, or holds it or one of its files (links followed)."""
    if target.name in ("", ".."):
        raise Usage("the target has no name", where=str(target), fix="name a file or folder that is to be made")
    goal, source = Path(os.path.realpath(target)), Path(os.path.realpath(root))
    if goal == source:
        raise Usage(
            "source and target are the same", where=str(target), fix="name another target; the source is never changed"
        )
    if goal.is_relative_to(source) and source.is_dir():
        raise Usage(
            "the target lies inside the source",
            where=str(target),
            why=f"the source is {root}",
            fix="name a target outside of it",
        )
    for path in (source, *(Path(os.path.realpath(f)) for f in files)):
        if path.is_relative_to(goal):
            raise Usage(
                "the source lies inside the target", where=str(target), why=f"{path} is read", fix="name another target"
            )


def require_paths(files: Sequence[OutputFile], folder: bool) -> None:
    """Unsafe where a file of the plan would leave the target, ValueError where two cannot stand beside each other."""
    if not folder:
        if [f.path for f in files] != [""]:
            raise ValueError('a target that is no folder is one file with path ""')
        return
    seen: set[str] = set()
    for file in files:
        pure = PurePosixPath(file.path)
        if (
            pure.is_absolute()
            or ".." in pure.parts
            or str(pure) != file.path
            or file.path in ("", ".")
            or "\0" in file.path
        ):
            raise Unsafe("a file of the result would leave its folder", where=repr(file.path), code="unsafe-path")
        if file.path in seen:
            raise ValueError(f"two files of the result are {file.path}")
        seen.add(file.path)
    for path in seen:
        if any(str(parent) in seen for parent in PurePosixPath(path).parents):
            raise ValueError(f"{path} is a file, and lies in one")


def free_nbytes(path: Path) -> int:
    """Bytes that this user may still write where path is or would be."""
    for place in (path, *path.absolute().parents):
        try:
            found = os.statvfs(place)
        except OSError:
            continue
        return found.f_bavail * found.f_frsize
    return 0


def require_space(need: int, target: Path) -> None:
    """NoSpace where less is free than is needed; both in bytes."""
    free = free_nbytes(target.parent)
    if need > free:
        raise NoSpace(
            f"{need} bytes are needed, {free} are free",
            where=str(target.absolute().parent),
            why=f"{need - free} bytes are missing for {target.name}",
            fix="make room, or name a target on another disk",
        )


def require_new(target: Path, overwrite: bool) -> None:
    """Usage where the target is there and may not be replaced."""
    if os.path.lexists(target) and not overwrite:
        raise Usage(
            "the target is already there",
            where=str(target),
            fix="name another one, or use --overwrite to replace it when the new one is whole",
        )


class Partial:
    """The hidden folder of one target, held by a lock. Use as a context.

    The lock goes with it, the folder stays for --resume.
    """

    def __init__(self, target: Path) -> None:
        """Takes the folder, making it where it is not there. CkptError (code busy) where another job has it."""
        self.target = target
        self.path = self.folder_of(target)
        self.journal = self.path / "journal.jsonl"
        self.scratch = self.path / "scratch"
        self.out = self.path / "out" / target.name
        self._old = _old_of(target)
        self.fd = -1
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            while not self._lock():
                pass
            self._settle()
        except OSError as err:
            self.close()
            raise writing_failed(err, self.path) from err
        except BaseException:
            self.close()
            raise

    @staticmethod
    def folder_of(target: Path) -> Path:
        """The hidden folder of a target."""
        return target.parent / f".{target.name}.ckptctl-partial"

    def _lock(self) -> bool:
        """Opens and locks the journal; False where the job that had it removed it in between."""
        self.path.mkdir(exist_ok=True)
        try:
            self.fd = os.open(self.journal, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as err:
            if err.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise CkptError(
                    "another job is writing this target",
                    where=str(self.target),
                    why=f"it holds {self.journal}",
                    fix="wait until it is done, or stop it",
                    code="busy",
                ) from err
            if err.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self.fd), self.journal.stat()):
                return True
        os.close(self.fd)
        self.fd = -1
        return False

    def _settle(self) -> None:
        """What a job left that was killed while it put its result in place."""
        aside = self.path / "old" / self.target.name
        if os.path.lexists(aside) and not os.path.lexists(self.target):
            aside.rename(self.target)
        _remove(self._old)

    def read(self) -> bytes:
        """The journal's bytes."""
        pieces, at = [], 0
        while piece := os.pread(self.fd, 1 << 20, at):
            pieces.append(piece)
            at += len(piece)
        return b"".join(pieces)

    def clear(self) -> None:
        """Start anew: nothing but an empty journal is left."""
        try:
            os.ftruncate(self.fd, 0)
            for entry in list(self.path.iterdir()):
                if entry != self.journal:
                    _remove(entry)
        except OSError as err:
            raise writing_failed(err, self.path) from err

    def path_of(self, file: OutputFile) -> Path:
        """Where a file of the plan is made."""
        return self.out / file.path if file.path else self.out

    def missing_nbytes(self, files: Iterable[OutputFile]) -> int:
        """Bytes of the disk that the files in the making do not have yet."""
        need = 0
        for file in files:
            try:
                have = self.path_of(file).stat().st_blocks * 512
            except OSError:
                have = 0
            need += max(0, file.nbytes - have)
        return need

    def lay_out(self, files: Sequence[OutputFile], folder: bool) -> set[int]:
        """Make every file in its full size, and the folders.

        Returns the numbers of those that were there in that size before.
        """
        kept: set[int] = set()
        path = self.out
        try:
            _remove(self.scratch)
            self.scratch.mkdir()
            (self.out if folder else self.out.parent).mkdir(parents=True, exist_ok=True)
            for number, file in enumerate(files):
                path = self.path_of(file)
                if folder:
                    path.parent.mkdir(parents=True, exist_ok=True)
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                try:
                    if os.fstat(fd).st_size == file.nbytes:
                        kept.add(number)
                    else:
                        os.ftruncate(fd, 0)
                        allocate(fd, file.nbytes)
                finally:
                    os.close(fd)
        except OSError as err:
            raise writing_failed(err, path) from err
        return kept

    def commit(self, files: Sequence[OutputFile], overwrite: bool, said: Callable[[int], None]) -> None:
        """Give the result its name. The bytes of files are on the disk already. said(inode) is called just before.

        With overwrite, what was there stands until then and is removed after. Usage where a target turned up meanwhile.
        """
        try:
            _sync_tree(self.out, set(map(self.path_of, files)))
            said(self.out.lstat().st_ino)
            if os.path.lexists(self.target):
                require_new(self.target, overwrite)
                self._swap()
            elif not rename(self.out, self.target, NOREPLACE):
                self.out.rename(self.target)
            _sync(self.target.parent)
            self.discard()
        except FileExistsError as err:
            raise Usage(
                "the target turned up while the result was made",
                where=str(self.target),
                fix="move it away, then --resume",
            ) from err
        except OSError as err:
            raise writing_failed(err, self.target) from err

    def _swap(self) -> None:
        with suppress(OSError):  # who could not look into what was there is not let in by its successor
            old, is_folder = self.target.lstat().st_mode, self.out.is_dir()
            if stat.S_ISDIR(old) if is_folder else stat.S_ISREG(old):
                self.out.chmod(stat.S_IMODE(old) | (stat.S_IRWXU if is_folder else 0))
        if rename(self.out, self.target, EXCHANGE):
            return
        aside = self.path / "old" / self.target.name
        aside.parent.mkdir(exist_ok=True)
        self.target.rename(aside)
        self.out.rename(self.target)

    def discard(self) -> None:
        """Remove the folder. It is renamed first, so that a job that starts now finds none rather than half of one."""
        self.path.rename(self._old)
        remove_old(self.target)

    def close(self) -> None:
        """Let go of the lock."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Partial:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def plain_target(target: Path) -> Path:
    """The target without `..` behind folders that are not there: to make those for the path's sake would leave them."""
    if ".." not in target.parent.parts or target.parent.exists():
        return target
    return Path(os.path.realpath(target.parent)) / target.name


def is_complete(target: Path, inode: int | None) -> bool:
    """Whether the target is what the job made whose journal has that inode."""
    return inode is not None and os.path.lexists(target) and target.lstat().st_ino == inode


def _old_of(target: Path) -> Path:
    return target.parent / f".{target.name}.ckptctl-old"


def removed_journal(target: Path) -> bytes:
    """The journal of a finished job that was stopped while its folder was removed; empty where there is none."""
    try:
        return (_old_of(target) / "journal.jsonl").read_bytes()
    except OSError:
        return b""


def remove_old(target: Path) -> None:
    """Remove what a job has put aside, its journal last: as long as it is there, --resume knows the job as done."""
    old = _old_of(target)
    try:
        if old.is_dir() and not old.is_symlink():
            for entry in list(old.iterdir()):
                if entry.name != "journal.jsonl":
                    _remove(entry)
        _remove(old)
    except OSError as err:
        raise writing_failed(err, old) from err


def _remove(path: Path) -> None:
    """A file, a link or a whole folder; nothing where it is not there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_tree(path: Path, synced: set[Path]) -> None:
    """A file, or a folder and all in it, the innermost first; files that are on the disk already are left alone."""
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            if Path(folder, name) not in synced:
                _sync(Path(folder, name))
        _sync(Path(folder))
