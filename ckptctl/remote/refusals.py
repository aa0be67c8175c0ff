"""Errors of huggingface_hub and of its HTTP client as the user's, and the bounded tries of what may pass.

A refusal that stays is told at once, in the server's own words. Tokens never stand in a message.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any, TypeVar

from ckptctl.core.errors import CkptError, Denied, Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

TRIES = 5
FIRST_WAIT_SECONDS = 1.0
"""Before the second try; each wait is twice the one before."""
_LONGEST_WAIT_SECONDS = 60.0
"""What a server may ask for by Retry-After; one that wants a longer pause is believed, and the user told."""
_TEMPORARY = frozenset({408, 412, 425, 429})
"""412: a commit came between ours and what it was made for; what is there is looked at again."""
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{6,}|\b[Bb]earer +[^\s'\",;]+")
_WORDS_LIMIT = 600


def asked(what: str, where: str, ask: Callable[[], T]) -> T:
    """What a call gives, tried again, TRIES times in all, where the failure may pass. Raises what told() gives."""
    for count in range(1, TRIES + 1):
        try:
            return ask()
        except CkptError:
            raise
        except Exception as err:
            wait_or_raise(what, where, err, count)
    raise AssertionError


def wait_or_raise(what: str, where: str, err: Exception, count: int) -> None:
    """After try number count failed, from 1: waits where another one may do.

    Raises Denied (401, 403), CkptError with code hub-refused for what stays, Interrupted for what did not pass, and
    errors of this machine's files as they are.
    """
    cause = _cause(err)
    if isinstance(cause, CkptError) or (isinstance(cause, OSError) and not status_of(cause) and not may_pass(cause)):
        raise cause
    if not may_pass(cause):
        raise refusal(what, where, cause) from err
    wait = max(FIRST_WAIT_SECONDS * 2 ** (count - 1), _retry_after(cause))
    if count == TRIES or wait > _LONGEST_WAIT_SECONDS:
        raise _unreachable(what, where, cause, count) from err
    time.sleep(wait)


def status_of(err: BaseException) -> int:
    """The status of the answer that an error is about, 0 where there is none."""
    return int(getattr(getattr(err, "response", None), "status_code", 0) or 0)


def may_pass(err: BaseException) -> bool:
    """Whether another try may do: a server that is busy or down, a connection that broke."""
    status = status_of(err)
    return status in _TEMPORARY or status >= 500 or (not status and _is_transport(err))


def refusal(what: str, where: str, err: BaseException) -> CkptError:
    """An error that another try does not mend, in the server's words."""
    status, said = status_of(err), words(err)
    why = f"status {status}: {said}" if status else said
    if status in (401, 403):
        return Denied(
            f"{what}: the Hub refuses",
            where=where,
            why=why,
            fix="log in with `hf auth login`, or set HF_TOKEN to a token that may write to this repository",
        )
    return CkptError(f"{what}: the Hub refuses", where=where, why=why, fix=_fix(status), code="hub-refused")


def words(err: BaseException) -> str:
    """What an error says, the server's message where it has one, on one line and without tokens."""
    said = str(getattr(err, "server_message", None) or "") or str(err) or type(err).__name__
    return plain(said)[:_WORDS_LIMIT]


def plain(text: str) -> str:
    """Text on one line, without control characters and without tokens."""
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    text = _TOKEN.sub("(token)", text)
    token = _token()
    return text.replace(token, "(token)") if token else text


def _token() -> str:
    import huggingface_hub

    return huggingface_hub.get_token() or ""


def _fix(status: int) -> str:
    if status == 404:
        return "check the name of the repository and of the revision, and whether the token may see it"
    if status == 413:
        return "leave large files out with --exclude, or ask the Hub for more room"
    return "see the server's words"


def _unreachable(what: str, where: str, err: BaseException, tries: int) -> CkptError:
    status = f"status {status_of(err)}: " if status_of(err) else f"{type(err).__name__}: "
    return Interrupted(
        f"{what}: the Hub did not do it",
        where=where,
        why=f"{status}{words(err)} ({tries} tries)",
        fix="run the same command later: it goes on from what the Hub has",
        code="hub-unreachable",
    )


def _chain(err: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    found: BaseException | None = err
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__


def _cause(err: BaseException) -> BaseException:
    """The error of the server or of the connection that another one is about, itself where there is none."""
    return next((e for e in _chain(err) if status_of(e) or _is_transport(e)), err)


def _is_transport(err: BaseException) -> bool:
    """An error of the connection. The client is httpx in huggingface_hub 1, httpx2 in 2: known by name."""
    names = {c.__name__ for c in type(err).__mro__ if c.__module__.startswith("httpx")}
    return "TransportError" in names or isinstance(err, ConnectionError | TimeoutError)


def _retry_after(err: BaseException) -> float:
    headers: Any = getattr(getattr(err, "response", None), "headers", None) or {}
    try:
        return max(0.0, float(headers.get("Retry-After", 0)))
    except (TypeError, ValueError):
        return 0.0
