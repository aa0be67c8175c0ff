"""Sources on the Hub: which operations take an address, and what the others say to one.

An operation gets a folder of placeholders in place of the address; what it says of that folder is said of the address.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from ckptctl.core.errors import CkptError, Usage
from ckptctl.remote import places
from ckptctl.remote.address import is_address, parsed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_P = ParamSpec("_P")
_T = TypeVar("_T")


def reads_hub(count: int = 1) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """An operation whose first count arguments are paths, lists of paths, or addresses on the Hub.

    What it returns and raises has addresses in place of the folders that stood for them.
    """

    def wrap(operation: Callable[_P, _T]) -> Callable[_P, _T]:
        @wraps(operation)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            near = [_near_all(a) for a in args[:count]]
            if near == list(args[:count]):
                return operation(*args, **kwargs)
            with shown_errors():
                made: _T = places.shown_in(operation(*near, *args[count:], **kwargs))  # type: ignore[arg-type]
            return made

        return run

    return wrap


def near(path: Path | str) -> Path | str:
    """A path as it is; for an address on the Hub, the folder or file on this machine that stands for it."""
    if not is_address(path):
        return path
    address = parsed(path)  # what is no address costs no import
    from ckptctl.remote.hub import place

    return place(address)


def refuse_address(path: Path | str, flag: str = "") -> None:
    """Usage for an address on the Hub, where only files of this machine are read."""
    if is_address(path):
        raise Usage(
            f"{flag + ' ' if flag else ''}{parsed(path)} is on the Hub, and this reads files of this machine only",
            fix="download it (`hf download`) and give its folder; inspect, ls, diff, convert, and validate up to"
            " --level structure, read from the Hub",
            code="hub-not-here",
        )


@contextmanager
def shown_errors() -> Iterator[None]:
    """Errors with addresses in place of the folders that stand for them."""
    try:
        yield
    except CkptError as err:
        err.what, err.where, err.why, err.fix = map(places.shown, (err.what, err.where, err.why, err.fix))
        err.args = (err.what, *err.args[1:])
        raise


def _near_all(given: object) -> object:
    if isinstance(given, str | Path):
        return near(given)
    if isinstance(given, list | tuple):
        return type(given)(near(g) if isinstance(g, str | Path) else g for g in given)
    return given
