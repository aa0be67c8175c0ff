"""Ranges of one file by HTTP: where it is redirected to, what is tried again, and every answer checked.

What is not what was asked for is an error: another commit, another size, a page instead of a file, a body that is cut
off and stays so. The token goes to the Hub's own host only, and no message has a token or a signed address in it.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urljoin, urlsplit

from ckptctl.core.errors import CkptError, Denied, MissingFile, SourceChanged, Unsupported
from ckptctl.remote import refusals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_TRIES = 5
"""Requests without a byte of progress after which it is given up."""
_LONGEST_WAIT = 60.0
"""Seconds: a server that wants a longer pause is believed, and told to the user."""
_REDIRECTS = 5
_PROGRESS_NBYTES = 64 << 10
"""Bytes after which a stream that breaks may break as often again."""
_SKIP_NBYTES = 256 << 10
_LOCATION_SECONDS = 300.0
"""How long the address that a file was redirected to is used again."""
TEMPORARY = (408, 425, 429, 500, 502, 503, 504)
_REDIRECT = (301, 302, 303, 307, 308)
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Client(Protocol):
    """As much of httpx.Client as is used here."""

    def build_request(self, method: str, url: str, *, headers: Mapping[str, str], timeout: float) -> Any:
        """A request."""

    def send(self, request: Any, *, stream: bool, follow_redirects: bool) -> Any:
        """Its answer, without its body."""


@dataclass(frozen=True)
class Connection:
    """How to ask a Hub. headers hold the user's token, where there is one; failures are what a client raises.

    new gives the client, anew where the one before was closed.
    """

    endpoint: str
    headers: Mapping[str, str]
    client: Callable[[], Client]
    failures: tuple[type[BaseException], ...]
    timeout: float
    commit: str


class RemoteFile:
    """A file at an address, as the Hub listed it. Threads may read at once, each its own stream."""

    def __init__(self, connection: Connection, url: str, name: str, nbytes: int, sha256: str = "") -> None:
        """Name is what messages call it; sha256 that of its content, "" where the Hub gives none."""
        self.connection, self.url, self.name, self.nbytes, self.sha256 = connection, url, name, nbytes, sha256
        self._location, self._until = "", 0.0

    def stream(self, start: int, stop: int | None = None) -> Stream:
        """A stream from start on; up to stop where that is known."""
        return Stream(self, start, stop)

    def answer(self, start: int, stop: int) -> tuple[Any, int]:
        """An open answer whose body is bytes [start, n) of the file, and n, which is at most stop.

        Raises Failed for what is worth another try, CkptError for the rest.
        """
        if self._location and time.monotonic() < self._until:
            location, self._location = self._location, ""
            response = self._get(location, start, stop)
            if response.status_code == 206:
                self._location = location
                return self._checked(response, start, stop)
            response.close()  # it may have been signed for a while only: the Hub gives another
        url = self.url
        for _ in range(_REDIRECTS):
            response = self._get(url, start, stop)
            if response.status_code not in _REDIRECT:
                if response.status_code == 206 and not self._is_hub(url):
                    self._location, self._until = url, time.monotonic() + _LOCATION_SECONDS
                return self._checked(response, start, stop)
            try:
                self._same_file(response)
                url = self._redirected(url, response.headers.get("location", ""))
            finally:
                response.close()
        raise self._error("the Hub redirects without end", f"{_REDIRECTS} times", code="hub-answer")

    def _get(self, url: str, start: int, stop: int) -> Any:
        own = self._is_hub(url)
        headers = {k: v for k, v in self.connection.headers.items() if own or k.lower() in ("user-agent",)}
        headers |= {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        client = self.connection.client()
        try:
            request = client.build_request("GET", url, headers=headers, timeout=self.connection.timeout)
            if not own:
                request.headers.pop("cookie", None)
                request.headers.pop("authorization", None)
            return client.send(request, stream=True, follow_redirects=False)
        except self.connection.failures as err:
            raise Failed(f"{type(err).__name__}: {plain(str(err))}") from err

    def _is_hub(self, url: str) -> bool:
        return _host(url) == _host(self.connection.endpoint)

    def _redirected(self, url: str, location: str) -> str:
        """Where a redirect leads. An address that is no file on the web is refused."""
        allowed = {"https", urlsplit(self.connection.endpoint).scheme}
        try:
            target = urljoin(url, location)
            is_file = urlsplit(target).scheme in allowed and bool(urlsplit(target).hostname)
        except ValueError:
            target, is_file = location, False
        if not location or not is_file:
            why = f"to {plain(target)!r}" if location else "to nowhere"
            raise self._error("the Hub redirects to where no file can be", why, code="hub-answer")
        return target

    def _same_file(self, response: Any) -> None:
        """SourceChanged where headers of the Hub are of another commit or content than was listed."""
        commit = response.headers.get("x-repo-commit", "")
        if commit and commit != self.connection.commit:
            raise self.changed("commit", self.connection.commit, commit)
        size = response.headers.get("x-linked-size", "")
        if size and size != str(self.nbytes):
            raise self.changed("size", f"{self.nbytes} bytes", f"{size[:40]} bytes")
        tag = response.headers.get("x-linked-etag", "").removeprefix("W/").strip('"')
        if self.sha256 and _SHA256.fullmatch(tag) and tag != self.sha256:
            raise self.changed("SHA-256", self.sha256, tag)

    def _checked(self, response: Any, start: int, stop: int) -> tuple[Any, int]:
        """An answer whose body is what was asked for, or the beginning of it."""
        try:
            if response.status_code not in (200, 206):
                raise self._refused(response)
            self._same_file(response)
            if response.headers.get("content-encoding", "identity") != "identity":
                raise self._error(
                    "the Hub answers with other bytes than the file's",
                    f"its encoding is {response.headers['content-encoding'][:40]!r}",
                    code="hub-answer",
                )
            return response, self._stop_of(response, start, stop)
        except BaseException:
            response.close()
            raise

    def _stop_of(self, response: Any, start: int, stop: int) -> int:
        said, length = response.headers.get("content-range", ""), response.headers.get("content-length", "")
        if response.status_code == 200:
            if length == str(self.nbytes) and start == 0:
                return stop  # all of it, of which the rest is not read
            kind = response.headers.get("content-type", "")[:60] or "no type"
            why = f"{length[:40] or 'unknown'} bytes of {kind}, where bytes {start} to {stop} of {self.nbytes} are due"
            raise self._error(
                "the Hub answers with something else than the part that was asked for", why, code="hub-answer"
            )
        found = _RANGE.fullmatch(said)
        first, last = (int(found[1]), int(found[2])) if found else (-1, -1)
        if found and found[3] not in ("*", str(self.nbytes)):
            raise self.changed("size", f"{self.nbytes} bytes", f"{found[3][:40]} bytes")
        if first != start or not start <= last < stop or (length and length != str(last + 1 - first)):
            why = f"{said[:80]!r} in {length[:40] or 'unknown'} bytes, where bytes {start} to {stop} are due"
            raise self._error("the Hub answers with another part than was asked for", why, code="hub-answer")
        return last + 1

    def _refused(self, response: Any) -> CkptError | Failed:
        """What a status says that is no answer."""
        status = response.status_code
        words = plain(response.headers.get("x-error-message", ""))[:300]
        why = f"status {status}" + (f": {words}" if words else "")
        if status in TEMPORARY:
            return Failed(why, _pause(response.headers), busy=status == 429)
        if status in (401, 403):
            return Denied(
                "the Hub does not give this file to this user",
                where=self.name,
                why=why,
                fix="log in with `hf auth login`, or set HF_TOKEN, as a user who may read it",
            )
        if status in (404, 410):
            return MissingFile("the file is not on the Hub any more", where=self.name, why=why, fix="run again")
        if status == 416:
            return self.changed("size", f"{self.nbytes} bytes", "less")
        return self._error("the Hub does not answer", why, code="hub-answer")

    def changed(self, what: str, was: str, now: str) -> SourceChanged:
        """The error for a file that is not the one that was listed."""
        return SourceChanged(
            f"the file has another {what} than the Hub listed",
            where=self.name,
            why=f"{was} in the list, {now} now",
            fix="run again; where it stays so, the Hub or something before it is at fault",
        )

    def _error(self, what: str, why: str, *, code: str) -> CkptError:
        kind = Unsupported if code == "no-ranges" else CkptError
        return kind(what, where=self.name, why=why, fix="run again, or download the repository first", code=code)


class Failed(Exception):
    """A request that may succeed when it is made again. pause: seconds that the server wants to be left alone."""

    def __init__(self, why: str, pause: float = 0.0, *, busy: bool = False) -> None:
        super().__init__(why)
        self.why, self.pause, self.busy = why, pause, busy


class Stream:
    """A file's bytes from some place on: what is wanted, and up to where its reader said that it would go on."""

    def __init__(self, file: RemoteFile, start: int, stop: int | None) -> None:
        self._file, self.position = file, start
        self._limit = file.nbytes if stop is None else stop
        self._expected = start
        self._response: Any = None
        self._body: Iterator[bytes] = iter(())
        self._rest = memoryview(b"")
        self._until = start
        """Where the body of the open answer ends."""
        self._is_exact = False

    def fill(self, views: Sequence[memoryview], check: Callable[[], None]) -> None:
        """Fill the views one after the other, as places.Forward has it."""
        left = sum(map(len, views))
        if self.position + left > self._limit:
            raise self._file.changed("size", f"{self._limit} bytes", "less than its metadata name")
        failures, got, since = 0, 0, 0
        for view in views:
            at = 0
            while at < len(view):
                check()
                try:
                    n = self._some(view[at:], left - got)
                except Failed as err:
                    self.close()
                    failures = 1 if got - since >= _PROGRESS_NBYTES else failures + 1
                    since = got
                    self._wait(err, failures, check)
                    continue
                at += n
                got += n
        if self.position >= self._until:
            self._finish()

    def expect(self, stop: int) -> None:
        """Reads will go on up to stop: one request does for them."""
        self._expected = stop

    def skip(self, start: int) -> bool:
        """Go on to start by reading what is before it. False where that is too far."""
        gap = start - self.position
        if not 0 <= gap <= _SKIP_NBYTES:
            return False
        if gap:
            if self._response is None:
                self.position = start
            else:
                self.fill([memoryview(bytearray(gap))], lambda: None)
        return True

    def _some(self, view: memoryview, wanted: int) -> int:
        """Bytes put at the front of view, at least one. wanted: how many are asked for, with those behind view."""
        while not self._rest:
            if self._response is None:
                stop = min(self._limit, max(self.position + wanted, self._expected))
                self._response, self._until = self._file.answer(self.position, stop)
                self._body = self._response.iter_raw()
                length = self._response.headers.get("content-length", "")
                self._is_exact = length == str(self._until - self.position)
            if self.position >= self._until:
                self._finish()
                continue
            try:
                self._rest = memoryview(next(self._body, b""))[: self._until - self.position]
            except self._file.connection.failures as err:
                raise Failed(f"the connection broke: {type(err).__name__}") from err
            if not self._rest:
                raise Failed(f"the answer stopped at byte {self.position}, {self._until} is its end")
        n = min(len(view), len(self._rest))
        view[:n] = self._rest[:n]
        self._rest = self._rest[n:]
        self.position += n
        return n

    def _finish(self) -> None:
        """Let go of an answer that was read to its end, so that the connection can be used again."""
        if self._response is not None and self._is_exact:
            with suppress(*self._file.connection.failures):  # every byte is here
                next(self._body, b"")
        self.close()

    def _wait(self, err: Failed, failures: int, check: Callable[[], None]) -> None:
        """Some time before the next try; an error where enough were made."""
        if failures >= _TRIES or err.pause > _LONGEST_WAIT:
            longer = f"; it wants {err.pause:.0f} s without requests" if err.pause else ""
            raise CkptError(
                "the Hub has no time for this user now" if err.busy else "the Hub could not be read from",
                where=self._file.name,
                why=f"{err.why}{longer}" + (f", {failures} times" if failures > 1 else ""),
                fix="check the connection, and run again later",
                code="hub-unreachable",
            ) from err
        until = time.monotonic() + max(err.pause, pause_before(failures))
        while (left := until - time.monotonic()) > 0:
            check()
            time.sleep(min(left, 0.2))

    def close(self) -> None:
        """Let go of the connection. The stream may go on, by another request."""
        if self._response is not None:
            response, self._response = self._response, None
            self._rest, self._body = memoryview(b""), iter(())
            response.close()


def _host(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    return parts.scheme, parts.hostname or "", port or {"https": 443, "http": 80}.get(parts.scheme)


def pause_before(tries: int) -> float:
    """Seconds to wait after so many requests that failed; not the same ones for every thread."""
    return 0.25 * 2.0 ** (tries - 1) * (0.8 + time.monotonic_ns() % 1000 / 2500)


def plain(text: str) -> str:
    """A text of the server's without what only it and this user may know: the query of an address, a token."""
    return re.sub(r"\?\S*", "?...", refusals.plain(text))[:500]


def _pause(headers: Mapping[str, str]) -> float:
    """Seconds that a server wants to pass before the next request, 0 where it does not say.

    Source: RFC 9110, 10.2.3 (Retry-After); huggingface_hub 2.4.0, utils/_http.py, parse_ratelimit_headers.
    """
    said = headers.get("retry-after", "").strip()
    if said.isascii() and said.isdigit():
        return float(said[:9])
    limit = re.search(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d{1,9})", headers.get("ratelimit", ""))
    return float(limit[1]) if limit else 0.0
