"""A Hugging Face Hub on the loopback, for tests with the real huggingface_hub client and no network.

    with HubServer(tmp_path / "hub") as hub:
        env = hub.environment(tmp_path / "home")      # for a subprocess: endpoint, token, its own HF_HOME, no Xet
        hub.add("model", "org/name", {"config.json": b"{}"})   # a repository without a client
        hub.fail("POST", "/commit/", 503, times=2)    # the next two are refused, later ones are not
        hub.requests, hub.sent, hub.received          # what came, and bytes of content that went each way

Large files are sent from another host name (`localhost`, as the Hub sends to a CDN) with `cdn=True`; each request says
whether a token came along. `latency` is waited before every answer. Endpoints are those that huggingface_hub 1.x and
2.x call for repositories, files, commits, pull requests and Xet tokens.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import socket
import tempfile
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from tests.support.hub_state import Entry, HubState, Refused, Repo
from tests.support.hub_xet import XetStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KINDS = {"models": "model", "datasets": "dataset", "spaces": "space"}
LARGE = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".distcp", ".npy", ".npz", ".zip", ".model", ".parquet")
REGULAR_LIMIT = 10_000_000  # bytes; larger files go to large-file storage whatever their name
TOKEN = "hf_loopbackTokenThatMustNeverBeSeen"
BLOCK = 1 << 18


@dataclass
class Request:
    """One request as the server saw it; `token` says whether it carried one, `host` the name it was sent to."""

    method: str
    path: str
    host: str
    range: str
    token: bool
    status: int = 0
    sent: int = 0
    received: int = 0


@dataclass
class Fault:
    """Up to `times` requests that fit are answered by `act`.

    A status refuses. "drop" cuts the connection before anything is done. "lose" does what is asked and cuts the
    connection instead of answering. "cut" sends half of a file. A function gets the handler and answers itself.
    """

    method: str
    pattern: re.Pattern[str]
    act: int | str | Callable[[Handler], None]
    times: int
    words: str
    headers: dict[str, str] = field(default_factory=dict)


class Handler(BaseHTTPRequestHandler):
    """Answers one request. `names` are the unquoted segments of the path, `query` its parameters."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits for the client's delayed ACK, 40 ms
    server: _Listener

    def log_message(self, *args: object) -> None:
        """Says nothing: tests look at HubServer.requests."""

    @property
    def hub(self) -> HubServer:
        return self.server.hub

    def serve(self) -> None:
        split = urlsplit(self.path)
        self.query = {name: values[-1] for name, values in parse_qs(split.query).items()}
        self.names = [unquote(name) for name in split.path.strip("/").split("/")]
        host = self.headers.get("Host", "")
        token = self.headers.get("Authorization", "")
        self.seen = Request(self.command, self.path, host, self.headers.get("Range", ""), bool(token))
        self.whole_body, self.fault = False, self.hub.next_fault(self.command, split.path)
        with self.hub.state.lock:
            self.hub.requests.append(self.seen)
        if self.hub.latency:
            time.sleep(self.hub.latency)
        try:
            self.answer()
        except Refused as refused:
            self.refuse(refused)
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = serve  # noqa: N815 (the base class's names)

    def answer(self) -> None:
        act = self.fault.act if self.fault else None
        if isinstance(act, int):
            raise Refused(act, self.fault.words)  # type: ignore[union-attr]
        if act == "drop":
            return self.hang_up()
        if callable(act):
            return act(self)
        return find_route(self)(self)

    def hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    # Reading and answering

    def blocks(self) -> Iterator[bytes]:
        """The request's body, sized or chunked."""
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline().split(b";")[0], 16):
                yield self.exactly(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            left = int(self.headers.get("Content-Length") or 0)
            while left:
                block = self.exactly(min(BLOCK, left))
                left -= len(block)
                yield block
        self.whole_body = True

    def exactly(self, size: int) -> bytes:
        block = self.rfile.read(size)
        if len(block) < size:
            raise ConnectionError("the client went away")
        return block

    def body(self) -> bytes:
        return b"".join(self.blocks())

    def asked(self) -> dict[str, Any]:
        return json.loads(self.body() or b"{}")

    def refuse(self, refused: Refused) -> None:
        if not self.whole_body:
            for _ in self.blocks():
                pass
        headers = {"X-Error-Message": refused.words, **(self.fault.headers if self.fault else {})}
        if refused.code:
            headers["X-Error-Code"] = refused.code
        self.fault = None  # a refusal is not "lost"
        self.json({"error": refused.words}, refused.status, headers)

    def json(self, value: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.reply(json.dumps(value).encode(), status, {"Content-Type": "application/json", **(headers or {})})

    def reply(self, body: bytes = b"", status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.seen.status = status
        if self.fault and self.fault.act == "lose":
            self.hang_up()
            return
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_content(self, entry_etag: str, headers: dict[str, str]) -> None:
        """A file, or the range of it that was asked for."""
        path = self.hub.state.content(entry_etag)
        if not path.is_file():
            raise Refused(404, "no such content")
        size = path.stat().st_size
        start, stop, status = 0, size, 200
        if asked := re.fullmatch(r"bytes=(\d*)-(\d*)", self.seen.range):
            first, last = asked.groups()
            start = int(first) if first else max(0, size - int(last))
            stop = min(size, int(last) + 1) if first and last else size
            if start >= size:
                return self.reply(b"", 416, {"Content-Range": f"bytes */{size}"})
            status, headers = 206, {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{size}"}
        self.seen.status = status
        self.send_response(status)
        whole = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes", **headers}
        for name, value in {**whole, "Content-Length": str(stop - start)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return None
        left = (stop - start) // 2 if self.fault and self.fault.act == "cut" else stop - start
        with path.open("rb") as source:
            source.seek(start)
            while left and (block := source.read(min(BLOCK, left))):
                self.wfile.write(block)
                left -= len(block)
                self.seen.sent += len(block)
        if self.fault and self.fault.act == "cut":
            self.hang_up()
        return None

    def receive(self, target: Path) -> tuple[str, str]:
        """Writes the body to `target` when it has come whole; its sha256 and md5."""
        sha256, md5 = hashlib.sha256(), hashlib.md5()
        handle, name = tempfile.mkstemp(dir=self.hub.state.parts)
        try:
            with os.fdopen(handle, "wb") as out:
                for block in self.blocks():
                    out.write(block)
                    sha256.update(block)
                    md5.update(block)
                    self.seen.received += len(block)
                    self.hub.pause_upload()
            Path(name).replace(target)
        finally:
            Path(name).unlink(missing_ok=True)
        return sha256.hexdigest(), md5.hexdigest()

    def writer(self) -> None:
        """Refuses who has no right to write."""
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            raise Refused(401, "Invalid username or password.")

    def repo(self) -> Repo:
        """The repository that the path names; a private one is not there for who has no token."""
        kind = KINDS[self.names[1]] if self.names[0] == "api" else "model"
        names = self.names[2:4] if self.names[0] == "api" else self.names[:2]
        if self.names[0] in ("datasets", "spaces"):
            kind, names = KINDS[self.names[0]], self.names[1:3]
        repo = self.hub.state.repo(kind, "/".join(names).removesuffix(".git"))
        token = self.headers.get("Authorization", "")
        if token and token != f"Bearer {self.hub.token}":
            raise Refused(401, "Invalid credentials in Authorization header")
        if repo.private and not token:
            raise Refused(401, "Invalid username or password.", "RepoNotFound")
        return repo

    def page(self, repo: Repo) -> str:
        """The address of the repository's web page."""
        return f"{self.hub.url}/{'' if repo.kind == 'model' else repo.kind + 's/'}{repo.name}"


def find_route(handler: Handler) -> Callable[[Handler], None]:
    """What answers the request: by method and the fixed words of its path, under models, datasets and spaces alike."""
    from tests.support import hub_routes  # it needs this module

    method = "GET" if handler.command == "HEAD" else handler.command
    names = handler.names
    if names[0] == "api" and len(names) >= 4 and names[1] in KINDS:
        key = names[4] if len(names) > 4 else "info"
        key = "discussion-" + names[6] if key == "discussions" and len(names) > 6 else key
        key = "discussion" if key == "discussions" and len(names) == 6 else key
        key = key.replace("xet-read-token", "xet-token").replace("xet-write-token", "xet-token")
    elif names[0] == "api":
        key = "/".join(names[1:])
    elif names[0] == "content":
        key = f"content-{names[2]}" if len(names) > 2 else "content"
    else:
        inner = names[3:] if names[0] in ("datasets", "spaces") else names[2:]
        key = "lfs-" + inner[-1] if inner[:3] == ["info", "lfs", "objects"] else inner[0] if inner else ""
    route = hub_routes.ROUTES.get((method, key))
    if route is None:
        raise Refused(404, f"this Hub has no {method} {handler.path}")
    return route


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    hub: HubServer

    def handle_error(self, request: object, client_address: object) -> None:
        """Errors of the server's own code are kept: `HubServer.__exit__` raises the first."""
        import sys

        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, (ConnectionError, TimeoutError)):
            self.hub.errors.append(error)


class HubServer:
    """A Hub that lives as long as the `with` block. `latency` in seconds; sizes in bytes; `page` in entries."""

    def __init__(
        self,
        folder: Path,
        *,
        token: str = TOKEN,
        user: str = "tester",
        latency: float = 0.0,
        part_size: int = 5 << 20,
        page: int = 1000,
        cdn: bool = True,
        xet: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.state = HubState(folder)
        self.token, self.user, self.latency, self.part_size, self.page_size = token, user, latency, part_size, page
        self.cdn = cdn
        self.xet = XetStore(folder / "xet") if xet else None
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.errors: list[BaseException] = []
        self.hold_after: int | None = None  # bytes of uploads after which they stand still (to kill a client there)
        self.held = threading.Event()
        self._listener = _Listener(("127.0.0.1", 0), Handler)
        self._listener.hub = self
        self.port = self._listener.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._listener.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.hold_after = None
        self._listener.shutdown()
        self._listener.server_close()
        if self.errors and error is None:
            raise AssertionError("the test server failed") from self.errors[0]

    # What tests set and look at

    @property
    def sent(self) -> int:
        """Bytes of file content sent so far."""
        return sum(request.sent for request in self.requests)

    @property
    def received(self) -> int:
        """Bytes of file content received so far, Xet not counted."""
        return sum(request.received for request in self.requests)

    def asked(self, method: str, pattern: str) -> list[Request]:
        """The requests so far whose method and path fit."""
        return [one for one in list(self.requests) if one.method == method and re.search(pattern, one.path)]

    def fail(
        self,
        method: str,
        pattern: str,
        act: int | str | Callable[[Handler], None],
        times: int = 1,
        words: str = "refused by the test",
        headers: dict[str, str] | None = None,
    ) -> Fault:
        """See Fault. `pattern` is searched in the path, "*" is any method; 429 says Retry-After: 1 unless told."""
        headers = {"Retry-After": "1"} if headers is None and act == 429 else headers or {}
        self.faults.append(Fault(method, re.compile(pattern), act, times, words, headers))
        return self.faults[-1]

    def next_fault(self, method: str, path: str) -> Fault | None:
        with self.state.lock:
            for fault in self.faults:
                if fault.times > 0 and fault.method in ("*", method) and fault.pattern.search(path):
                    fault.times -= 1
                    return fault
        return None

    def pause_upload(self) -> None:
        """Stands still once more than `hold_after` bytes have come, until that is None."""
        while self.hold_after is not None and self.received > self.hold_after:
            self.held.set()
            time.sleep(0.01)

    def environment(self, home: Path, *, token: str | None = None, xet: bool = False) -> dict[str, str]:
        """What a client needs: this endpoint, a token, a home of its own, and no proxy on the way."""
        variables = {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": self.token if token is None else token,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "0" if xet else "1",
            "HF_XET_XORB_COMPRESSION_POLICY": "none",
            "NO_PROXY": "127.0.0.1,localhost",
        }
        return {name: value for name, value in variables.items() if value != ""}

    def add(
        self, kind: str, name: str, files: dict[str, bytes | Path], *, private: bool = False, message: str = "add"
    ) -> str:
        """Puts files into a repository, made where it is not there; the commit's hash."""
        try:
            repo = self.state.repo(kind, name)
        except Refused:
            repo = self.state.create(kind, name, private)
        entries: dict[str, Entry] = {}
        for path, content in files.items():
            data = content if isinstance(content, bytes) else content.read_bytes()
            if path.endswith(LARGE) or len(data) > REGULAR_LIMIT:
                sha256 = hashlib.sha256(data).hexdigest()
                self.state.content(sha256).write_bytes(data)
                entries[path] = self.state.large(sha256)
            else:
                entries[path] = self.state.store(data)
        return self.state.commit(repo, "main", message, "", entries, []).oid

    def files(self, name: str, revision: str = "main", kind: str = "model") -> dict[str, bytes]:
        """Every file of a repository, .gitattributes left out."""
        tree = self.state.repo(kind, name).find(revision).tree
        names = sorted(path for path in tree if path != ".gitattributes")
        return {path: self.state.content(tree[path].etag).read_bytes() for path in names}

    def cdn_url(self, sha256: str) -> str:
        return f"http://localhost:{self.port}/content/{quote(sha256)}"


def is_large(path: str, size: int, sample: bytes) -> bool:
    """Whether the Hub keeps a file in large-file storage: by name, by size, or because it is no text."""
    return path.endswith(LARGE) or size > REGULAR_LIMIT or b"\0" in sample


def decode(text: str) -> bytes:
    return base64.b64decode(text)
