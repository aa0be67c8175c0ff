"""Pickles into value trees, by a machine of our own: no import, no call of anything that a file names.

What would have been built becomes an inert Record; a fixed short list of calls (`calls.CALLS`) and those that the
caller gives are evaluated. The machine keeps its own stacks, so nesting costs no recursion, and forgets memo entries
that nothing reads.
Source of the semantics: CPython 3.13, Lib/pickle.py, _Unpickler.
"""

from __future__ import annotations

import gc
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from ckptctl.core.errors import CkptError
from ckptctl.formats.pickles.calls import CALLS, Call
from ckptctl.formats.pickles.danger import Finding, findings
from ckptctl.formats.pickles.machine import Machine
from ckptctl.formats.pickles.scan import Scan, Truncated, read_ids, scan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckptctl.core.values import Global, Tree
    from ckptctl.formats.pickles.objects import Finish

_PAUSE_GC_ABOVE = 1 << 20


class Loaded(NamedTuple):
    """A pickle as a tree. stop is one past it; globals counts how often each name is asked for.

    risky_getattr counts the calls of getattr on something that is not inert. to_end: reading stopped because the data
    end, not at a fault; of `load_until_broken` alone.
    """

    tree: Tree
    stop: int
    globals: Counter[Global]
    risky_getattr: int
    to_end: bool = True

    @property
    def unsafe(self) -> list[Finding]:
        """The names that would run code."""
        return findings(self.globals, self.risky_getattr)


def load(
    data: bytes,
    where: str,
    *,
    persistent: Callable[[Tree], Tree] | None = None,
    rebuild: Mapping[str, Call] | None = None,
    finish: Mapping[str, Finish] | None = None,
    known: Mapping[str, Callable[[Tree], Tree]] | None = None,
    start: int = 0,
    scanned: Scan | None = None,
) -> Loaded:
    """The value tree of the pickle at data[start:]. where is the file's name, for messages.

    persistent turns a persistent id into a tree (default: a PersistentId). rebuild evaluates calls by dotted name:
    each is given the arguments. finish is asked when a Record of that func is given its state (the Record, the
    state): what it returns takes the Record's place. known is the same for classes whose instances become something
    compact made of their state alone; with it, torch.Size gives plain tuples, equal ones shared where they are near
    each other. All of them return NotImplemented to leave a Record; KeyError, TypeError, ValueError and AttributeError
    of theirs become Damaged.

    Raises Damaged, also for what no pickler writes (missing marks, unhashable keys), and Unsupported. Runs nothing.
    """
    raw = data if type(data) is bytes else bytes(data)
    # Opcodes are checked as they are read; a pass over all of them first would cost a fifth of reading a small file.
    found = Scan(start, len(raw), 0, read_ids(raw, start, len(raw))) if scanned is None else scanned
    machine = Machine(raw, where, found, persistent, {**CALLS, **(rebuild or {})}, finish or {}, known or {})
    paused = found.stop - found.start > _PAUSE_GC_ABOVE and gc.isenabled()
    if paused:
        gc.disable()  # millions of containers, none of them garbage: each collection would walk them all
    try:
        tree = machine.run()
    except CkptError:
        if scanned is None:
            scan(raw, where, start)  # where an opcode is the cause, it says so
        raise
    finally:
        if paused:
            gc.enable()
    return Loaded(tree, machine.at + 1 if scanned is None else found.stop, machine.globals, machine.risky_getattr)


def load_until_broken(data: bytes, where: str) -> Loaded:
    """What the pickles from the start of data on ask for, as far as they can be read: by then an unpickler ran it.

    tree is None; stop is where reading stopped. Raises nothing for what the bytes are.
    """
    names: Counter[Global] = Counter()
    risky = at = 0
    to_end = True
    while at < len(data):
        found, cut = Scan(at, len(data), 0, read_ids(data, at, len(data))), len(data)
        with suppress(CkptError):
            try:
                found = scan(data, where, at)
            except Truncated as err:
                cut = min(err.at, len(data) - 1)
        machine = Machine(data, where, found, None, CALLS, {}, {})
        try:
            machine.run()
        except CkptError:
            at, to_end = len(data), machine.at >= cut
        else:
            at = machine.at + 1
        names += machine.globals
        risky += machine.risky_getattr
    return Loaded(None, at, names, risky, to_end)
