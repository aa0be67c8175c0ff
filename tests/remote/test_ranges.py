"""One file by ranges, from a server that answers as it should and in many ways that it should not."""

import socket
import threading
import time

import pytest

from ckptctl.core.errors import CkptError, Denied, MissingFile, SourceChanged
from ckptctl.remote import hub as adapter
from ckptctl.remote import places, ranges
from ckptctl.remote.address import parsed
from tests.support.hub_reading import hub  # noqa: F401 (a fixture)

DATA = bytes((i * 31 + (i >> 9) * 5) % 256 for i in range(5_000_000))


@pytest.fixture
def quick(monkeypatch):
    """No test waits long for another try."""
    monkeypatch.setattr(ranges, "pause_before", lambda tries: 0.01)


@pytest.fixture
def file(hub, quick):  # noqa: F811
    hub.add("model", "org/name", {"a.bin": DATA, "b.txt": b"text of the file"})
    root = adapter.place(parsed("hf://org/name"))
    hub.requests.clear()
    return places.at(root / "a.bin")


def filled(file, start, *lengths):
    views = [memoryview(bytearray(n)) for n in lengths]
    stream = file.stream(start)
    stream.fill(views, lambda: None)
    stream.close()
    return b"".join(views)


def answer(status, headers, body=b""):
    """A fault that answers with what it is given, whatever was asked for."""

    def act(handler):
        handler.seen.status = status
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)
        handler.seen.sent += len(body)
        handler.close_connection = True

    return act


def test_a_stream_gives_the_files_bytes_by_few_requests(hub, file):  # noqa: F811
    stream = file.stream(1000)
    stream.expect(4_001_000)
    got = b""
    while len(got) < 4_000_000:
        view = bytearray(100_000)
        stream.fill([memoryview(view)], lambda: None)
        got += view
    stream.close()
    assert got == DATA[1000:4_001_000]
    assert len(hub.asked("GET", "/resolve/")) == 1  # the address it leads to is used again
    assert [r.range for r in hub.asked("GET", "/content/")] == ["bytes=1000-4000999"]


def test_views_are_filled_one_after_the_other(file):
    assert filled(file, 17, 1, 0, 500_000, 3) == DATA[17:500_021]


def test_a_gap_is_skipped_by_reading_and_a_far_jump_is_not(hub, file):  # noqa: F811
    stream = file.stream(0)
    stream.expect(10_000)
    first = bytearray(1000)
    stream.fill([memoryview(first)], lambda: None)
    assert stream.skip(5000)
    second = bytearray(1000)
    stream.fill([memoryview(second)], lambda: None)
    assert second == DATA[5000:6000]
    assert not stream.skip(4_000_000)
    assert not stream.skip(0)
    stream.close()
    assert len(hub.asked("GET", "/content/")) == 1


def test_the_token_goes_to_the_hubs_host_alone(hub, file):  # noqa: F811
    filled(file, 0, 100)
    assert [(r.host.split(":")[0], r.token) for r in hub.requests] == [("127.0.0.1", True), ("localhost", False)]


@pytest.mark.parametrize("act", [503, 500, 429, 408, "drop"])
@pytest.mark.parametrize("where", ["/resolve/", "/content/"])
def test_what_may_pass_is_tried_again(hub, file, act, where):  # noqa: F811
    hub.fail("GET", where, act, times=2, headers={})
    assert filled(file, 5, 1000) == DATA[5:1005]


@pytest.mark.parametrize("act", [503, 429, "drop"])
def test_what_does_not_pass_ends(hub, file, act):  # noqa: F811
    hub.fail("GET", "/resolve/", act, times=1000, words="not today", headers={})
    with pytest.raises(CkptError) as raised:
        filled(file, 5, 1000)
    assert raised.value.code == "hub-unreachable"
    assert raised.value.where.startswith("hf://org/name@")
    assert raised.value.exit_code == 3
    assert act == "drop" or ("not today" in raised.value.why and str(act) in raised.value.why)
    assert len(hub.requests) == 5


def test_a_body_that_is_cut_goes_on_where_it_stopped(hub, file):  # noqa: F811
    hub.fail("GET", "/content/", "cut", times=3)
    assert filled(file, 100, 3_000_000) == DATA[100:3_000_100]
    firsts = [int(r.range.removeprefix("bytes=").split("-")[0]) for r in hub.asked("GET", "/content/")]
    assert firsts[0] == 100
    assert firsts == sorted(set(firsts))  # each went on, none began again
    assert len(firsts) >= 2


def test_a_body_that_is_always_cut_ends(hub, file):  # noqa: F811
    hub.fail(
        "GET", "/content/", answer(206, {"Content-Range": "bytes 0-999/5000000", "Content-Length": "1000"}, b""), 99
    )
    with pytest.raises(CkptError) as raised:
        filled(file, 0, 1000)
    assert raised.value.code == "hub-unreachable"
    assert len(hub.asked("GET", "/content/")) <= 10


def test_a_server_that_asks_for_a_long_pause_is_told_of(hub, file):  # noqa: F811
    hub.fail("GET", "/resolve/", 429, times=9, headers={"Retry-After": "3600"})
    began = time.monotonic()
    with pytest.raises(CkptError) as raised:
        filled(file, 0, 10)
    assert "3600 s" in raised.value.why
    assert time.monotonic() - began < 20
    assert len(hub.requests) == 1


def test_a_short_pause_is_kept(hub, file):  # noqa: F811
    hub.fail("GET", "/resolve/", 429, times=1, headers={"RateLimit": '"api";r=0;t=1'})
    began = time.monotonic()
    assert filled(file, 0, 10) == DATA[:10]
    assert time.monotonic() - began >= 1


def test_who_waits_can_be_stopped(hub, file):  # noqa: F811
    hub.fail("GET", "/resolve/", 429, times=9, headers={"Retry-After": "30"})

    class Stop(Exception):
        pass

    began = time.monotonic()

    def check():
        if time.monotonic() - began > 0.5:
            raise Stop

    with pytest.raises(Stop):
        file.stream(0).fill([memoryview(bytearray(10))], check)
    assert time.monotonic() - began < 20


SIZE = len(DATA)
WRONG = {
    "a page": (200, {"Content-Type": "text/html", "Content-Length": "15"}, b"<html>no</html>"),
    "a page of unknown length": (200, {"Content-Type": "text/html"}, b"<html>no</html>"),
    "another part": (206, {"Content-Range": f"bytes 50-149/{SIZE}", "Content-Length": "100"}, b"x" * 100),
    "more than was asked for": (
        206,
        {"Content-Range": f"bytes 40-{SIZE - 1}/{SIZE}", "Content-Length": str(SIZE - 40)},
        b"x" * 9960,
    ),
    "no range": (206, {"Content-Length": "100"}, b"x" * 100),
    "a range of nothing": (206, {"Content-Range": "bytes */100", "Content-Length": "100"}, b"x" * 100),
    "a length that is not the range's": (
        206,
        {"Content-Range": f"bytes 40-139/{SIZE}", "Content-Length": "90"},
        b"x" * 90,
    ),
    "a huge length": (206, {"Content-Range": f"bytes 40-139/{SIZE}", "Content-Length": str(1 << 62)}, b"x" * 100),
    "compressed": (
        206,
        {"Content-Range": f"bytes 40-139/{SIZE}", "Content-Length": "100", "Content-Encoding": "gzip"},
        b"x" * 100,
    ),
    "teapot": (418, {"Content-Length": "0"}, b""),
    "nothing": (204, {}, b""),
}
CHANGED = {
    "another size": (206, {"Content-Range": "bytes 40-139/4999999", "Content-Length": "100"}, b"x" * 100),
    "a shorter file": (416, {"Content-Range": "bytes */30", "Content-Length": "0"}, b""),
    "another commit": (
        206,
        {"Content-Range": f"bytes 40-139/{SIZE}", "Content-Length": "100", "X-Repo-Commit": "f" * 40},
        b"x" * 100,
    ),
    "another linked size": (302, {"X-Linked-Size": "77", "Location": "/x", "Content-Length": "0"}, b""),
    "another hash": (302, {"X-Linked-Etag": f'"{"0" * 64}"', "Location": "/x", "Content-Length": "0"}, b""),
}


@pytest.mark.parametrize("fault", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("where", ["/resolve/", "/content/"])
def test_an_answer_that_is_none_is_an_error(hub, file, fault, where):  # noqa: F811
    hub.fail("GET", where, answer(*fault), times=99)
    with pytest.raises(CkptError) as raised:
        filled(file, 40, 100)
    assert raised.value.code in ("hub-answer", "hub-unreachable")
    assert hub.token not in str(raised.value.as_dict())


@pytest.mark.parametrize("fault", CHANGED.values(), ids=CHANGED)
def test_a_file_that_is_not_the_listed_one_is_an_error(hub, file, fault):  # noqa: F811
    hub.fail("GET", "/resolve/", answer(*fault), times=99)
    with pytest.raises(SourceChanged):
        filled(file, 40, 100)


@pytest.mark.parametrize(
    "location",
    ["file:///etc/passwd", "ftp://localhost/x", "javascript:1", "http://[", "", "data:,x", "//", "http://"],
)
def test_a_redirect_to_what_is_no_file_is_refused(hub, file, location):  # noqa: F811
    hub.fail("GET", "/resolve/", answer(302, {"Location": location, "Content-Length": "0"}), times=99)
    with pytest.raises(CkptError) as raised:
        filled(file, 40, 100)
    assert raised.value.code in ("hub-answer", "hub-unreachable")  # httpx itself refuses some


def test_redirects_without_end_are_refused(hub, file):  # noqa: F811
    hub.fail("GET", "/", answer(302, {"Location": "/again", "Content-Length": "0"}), times=99)
    with pytest.raises(CkptError) as raised:
        filled(file, 40, 100)
    assert raised.value.code == "hub-answer"
    assert len(hub.requests) <= 6


def test_a_redirect_on_the_hub_itself_is_followed_with_the_token(hub, file):  # noqa: F811
    told = {"Location": "/org/name/resolve/main/a.bin", "Content-Length": "0"}
    hub.fail("GET", "/resolve/", answer(307, told), times=1)
    assert filled(file, 40, 100) == DATA[40:140]
    assert [r.token for r in hub.requests] == [True, True, False]


@pytest.mark.parametrize("status", [401, 403])
def test_a_user_without_rights_is_exit_4(hub, file, status):  # noqa: F811
    hub.fail("GET", "/resolve/", status, times=99, words="Access to model org/name is restricted")
    with pytest.raises(Denied) as raised:
        filled(file, 40, 100)
    assert raised.value.exit_code == 4
    assert "restricted" in raised.value.why
    assert len(hub.requests) == 1


def test_a_file_that_is_gone_is_missing(hub, file):  # noqa: F811
    hub.fail("GET", "/resolve/", 404, times=99)
    with pytest.raises(MissingFile):
        filled(file, 40, 100)


def test_an_address_that_is_no_longer_signed_is_asked_for_again(hub, file):  # noqa: F811
    assert filled(file, 0, 100) == DATA[:100]
    hub.fail("GET", "/content/", 403, times=1)
    assert filled(file, 200, 100) == DATA[200:300]
    assert len(hub.asked("GET", "/resolve/")) == 2


def test_a_whole_file_in_place_of_its_beginning_is_taken(hub, file):  # noqa: F811
    told = {"Content-Length": str(SIZE), "Content-Type": "application/octet-stream"}
    hub.fail("GET", "/resolve/", answer(200, told, DATA[:2_000_000]), times=1)
    assert filled(file, 0, 1000) == DATA[:1000]


def test_connections_are_used_again(hub, file, monkeypatch):  # noqa: F811
    opened = []
    original = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", lambda *a, **k: opened.append(a) or original(*a, **k))
    for start in range(0, 1_000_000, 100_000):
        assert file.read(start + 70_000, 5000) == DATA[start + 70_000 : start + 75_000]
    assert len(opened) <= 3


def test_threads_read_at_once(hub, file):  # noqa: F811
    wrong = []

    def work(start):
        stream = file.stream(start)
        view = bytearray(400_000)
        stream.fill([memoryview(view)], lambda: None)
        stream.close()
        if view != DATA[start : start + 400_000]:
            wrong.append(start)

    threads = [threading.Thread(target=work, args=(i * 400_000,)) for i in range(12)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


def test_a_signature_is_in_no_message(hub, file):  # noqa: F811
    told = {"Location": f"http://localhost:{hub.port}/gone?Signature=verysecret", "Content-Length": "0"}
    hub.fail("GET", "/resolve/", answer(302, told), times=99)
    with pytest.raises(CkptError) as raised:
        filled(file, 0, 10)
    assert "verysecret" not in str(raised.value.as_dict())


def test_words_of_a_server_have_no_token_and_no_signature(monkeypatch):
    from ckptctl.remote.ranges import plain

    monkeypatch.setenv("HF_TOKEN", "my-own-secret-token")
    said = plain("no: my-own-secret-token, hf_abcdefghij, Bearer xyz.1 at https://x/y?sig=1 \x1b[31m")
    assert not any(w in said for w in ("secret", "hf_abc", "xyz", "sig", "\x1b"))
    assert "https://x/y?..." in said
