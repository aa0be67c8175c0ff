"""Do the tensors of a torch file lie in their storages, and the storages in the file? Looks at a tree and sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.core.errors import CkptError, Damaged
from ckptctl.core.values import Record, Storage, TensorRef, Tree
from ckptctl.formats.pickles.nodes import show
from ckptctl.formats.pickles.walk import path_text, walk
from ckptctl.formats.torchfile.rebuild import why_unsupported

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptctl.formats.pickles.walk import Path

_LIMIT = 2**63
_MOST_AXES = 64


def wanted_nbytes(storage: Storage) -> int:
    """Bytes that a storage must have by what the pickle says of it."""
    return storage.numel if storage.dtype is None else storage.numel * storage.dtype.itemsize


def check_tree(tree: Tree, where: str, unsupported: list[tuple[str, str]]) -> Iterator[CkptError]:
    """Everything wrong with the tensors and storages of a tree whose storages have their place (start_byte, nbytes).

    Tensors that are whole but cannot be moved are put on unsupported, as (path, why).
    """
    seen: set[int] = set()  # storages, by identity: they are looked at beside their first tensor
    for path, node in walk(tree, storages=False):
        if isinstance(node, TensorRef):
            if not _is_plain(node) and (found := _tensor_problem(node, where, path)) is not None:
                yield found
            node = node.storage
        if isinstance(node, Storage):
            if id(node) in seen:
                continue
            seen.add(id(node))
            if node.start_byte < 0 and node.location == "meta":
                unsupported.append((path_text(path), "a meta tensor, which has no data"))
            elif (found := storage_problem(node, where, path)) is not None:
                yield found
        elif isinstance(node, Record) and (why := why_unsupported(node) or _over_storage(node)):
            unsupported.append((path_text(path), why))


def _over_storage(record: Record) -> str:
    """What a Record is that builds on a storage in a way that is not known: its elements are anyone's guess."""
    if not isinstance(record.args, tuple) or not any(isinstance(a, Storage) for a in record.args):
        return ""
    return f"what {record.cls or 'an object'} makes of stored elements is not known here"


def storage_problem(storage: Storage, where: str, path: Path) -> Damaged | None:
    """What is wrong with a storage's place; path is that of the tensor that shows it."""
    if storage.start_byte >= 0 and storage.nbytes == wanted_nbytes(storage):
        return None
    named = path_text(path)
    of = f", the storage of {named}," if named else ""
    if storage.start_byte < 0:
        return Damaged(
            f"data/{storage.key}{of} is not in the file",
            where=f"{where}, {named}" if named else where,
            why=f"the pickle says it holds {wanted_nbytes(storage)} bytes",
            fix="copy the file again",
            code="storage-missing",
        )
    return Damaged(
        f"data/{storage.key}{of} has the wrong size",
        where=f"{where}, {named}" if named else where,
        why=f"{wanted_nbytes(storage)} bytes wanted, {storage.nbytes} there",
        fix="copy the file again",
        code="storage-size-mismatch",
    )


def _is_plain(t: TensorRef) -> bool:
    """Whether a tensor is all of its storage, or the front of it, row by row: then nothing is wrong with it."""
    run = 1
    for n, step in zip(reversed(t.shape), reversed(t.stride), strict=False):
        if step != run or n < 1:
            return False
        run *= n
    fits = t.storage.dtype is t.dtype and run <= t.storage.numel < _LIMIT // 128
    return fits and not t.offset and len(t.shape) == len(t.stride) <= _MOST_AXES


def _tensor_problem(t: TensorRef, where: str, path: Path) -> Damaged | None:
    def bad(what: str, why: str, code: str) -> Damaged:
        named = path_text(path) or "the tensor"
        return Damaged(f"{named} {what}", where=f"{where}, {named}", why=why, fix="copy the file again", code=code)

    if len(t.shape) > _MOST_AXES:
        return bad("has too many axes", f"{len(t.shape)}, at most {_MOST_AXES} are read", "bad-shape")
    if len(t.shape) != len(t.stride):
        return bad(
            "has a shape and strides that do not fit", f"shape {show(t.shape)}, strides {show(t.stride)}", "bad-shape"
        )
    if any(n < 0 for n in t.shape):
        return bad("has a negative size", f"shape {show(t.shape)}", "bad-shape")
    if t.offset < 0 or any(n < 0 for n in t.stride):
        return bad(
            "has a negative offset or stride", f"offset {show(t.offset)}, strides {show(t.stride)}", "bad-offsets"
        )
    if max((*t.shape, *t.stride, t.offset)) >= _LIMIT or t.numel * t.dtype.bits >= _LIMIT:
        return bad("is larger than any file", f"shape {show(t.shape)} of {t.dtype.name}", "size-overflow")
    whole = t.storage.numel if t.storage.dtype is not None else t.storage.numel * 8 // t.dtype.bits
    used = t.offset + 1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride, strict=True)) if t.numel else 0
    if used > whole:
        why = f"it reaches to element {show(used)} of storage {show(t.storage.key)}, which has {whole}"
        return bad("lies outside its storage", why, "tensor-outside-storage")
    return None
