"""The endpoints of the loopback Hub, one function each; `ROUTES` finds them by method and word of the path."""

from __future__ import annotations

import hashlib
import json
import re
import time
from typing import TYPE_CHECKING, Any

import yaml

from tests.support.hub_server import Handler, decode, is_large
from tests.support.hub_state import Entry, Pull, Refused, Repo

if TYPE_CHECKING:
    from collections.abc import Callable


def whoami(h: Handler) -> None:
    h.writer()
    token = {"displayName": "test", "role": "write"}
    h.json({"type": "user", "name": h.hub.user, "orgs": [], "auth": {"type": "access_token", "accessToken": token}})


def validate_yaml(h: Handler) -> None:
    """The metadata block of a README.md: is it YAML, a mapping, with fields of the kinds that the Hub takes?"""
    content = h.asked()["content"]
    block = re.match(r"---\r?\n(.*?)\r?\n?---\r?\n", content, re.DOTALL)
    if not block:
        return h.json({"errors": [], "warnings": [{"message": "empty or missing yaml metadata in repo card"}]})
    errors: list[str] = []
    try:
        fields = yaml.safe_load(block.group(1))
    except yaml.YAMLError as error:
        fields, errors = {}, [f"Invalid YAML: {error}"]
    if not isinstance(fields, dict):
        fields, errors = {}, [*errors, "the metadata must be a mapping"]
    for name in ("license", "library_name", "pipeline_tag"):
        if name in fields and not isinstance(fields[name], str):
            errors.append(f'"{name}" must be a string')
    for name in ("tags", "language", "datasets"):
        values = fields.get(name, [])
        if not all(isinstance(one, str) for one in (values if isinstance(values, list) else [values])):
            errors.append(f'"{name}" must be strings')
    base = fields.get("base_model", [])
    for one in base if isinstance(base, list) else [base]:
        if not (isinstance(one, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", one)):
            errors.append('"base_model" must be names of models')
    return h.json({"errors": [{"message": one} for one in errors], "warnings": []}, 400 if errors else 200)


def create_repo(h: Handler) -> None:
    h.writer()
    asked = h.asked()
    kind, name = asked.get("type") or "model", f"{asked.get('organization') or h.hub.user}/{asked['name']}"
    private = bool(asked.get("private")) or asked.get("visibility") == "private"
    url = f"{h.hub.url}/{'' if kind == 'model' else kind + 's/'}{name}"
    try:
        h.hub.state.create(kind, name, private)
    except Refused as refused:
        return h.json({"error": refused.words, "url": url}, refused.status)
    return h.json({"url": url, "name": name, "id": name})


def delete_repo(h: Handler) -> None:
    h.writer()
    asked = h.asked()
    name = f"{asked.get('organization') or h.hub.user}/{asked['name']}"
    if h.hub.state.repos.pop((asked.get("type") or "model", name), None) is None:
        raise Refused(404, "Repository not found", "RepoNotFound")
    h.reply()


def info(h: Handler) -> None:
    repo = h.repo()
    commit = repo.find(h.names[5] if len(h.names) > 5 else "main")
    siblings = []
    for path, entry in sorted(commit.tree.items()):
        one: dict[str, Any] = {"rfilename": path}
        if h.query.get("blobs", "").lower() in ("1", "true"):
            one |= {"size": entry.size, "blobId": entry.blob}
            if entry.sha256:
                one["lfs"] = {"sha256": entry.sha256, "size": entry.size, "pointerSize": entry.pointer_size}
        siblings.append(one)
    fields = {"id": repo.name, "modelId": repo.name, "author": repo.name.split("/")[0], "sha": commit.oid}
    rest = {"private": repo.private, "gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": []}
    dates = {"lastModified": commit.date, "createdAt": repo.history("main")[-1].date}
    h.json({**fields, **rest, **dates, "_id": "1", "siblings": siblings})


def refs(h: Handler) -> None:
    repo = h.repo()
    named = [(name, oid) for name, oid in repo.refs.items() if not name.startswith("refs/")]
    pulls = [{"name": name[5:], "ref": name, "targetCommit": oid} for name, oid in repo.refs.items() if "/" in name]
    branches = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": oid} for name, oid in named]
    tags = [{"name": name, "ref": f"refs/tags/{name}", "targetCommit": oid} for name, oid in repo.tags.items()]
    h.json({"branches": branches, "tags": tags, "converts": [], "pullRequests": pulls})


def commits(h: Handler) -> None:
    listed = [
        {"id": one.oid, "title": one.title, "message": one.text, "date": one.date, "authors": [{"user": h.hub.user}]}
        for one in h.repo().history(h.names[5])
    ]
    h.json(listed)


def branch(h: Handler) -> None:
    h.writer()
    repo, asked = h.repo(), h.asked()
    if h.names[5] in repo.refs:
        raise Refused(409, "Reference already exists")
    repo.refs[h.names[5]] = repo.find(asked.get("startingPoint") or "main").oid
    h.reply()


def tag(h: Handler) -> None:
    h.writer()
    repo, asked = h.repo(), h.asked()
    if asked["tag"] in repo.tags:
        raise Refused(409, "Tag reference exists already")
    repo.tags[asked["tag"]] = repo.find(h.names[5]).oid
    h.reply()


# Files


def described(path: str, entry: Entry) -> dict[str, Any]:
    one: dict[str, Any] = {"type": "file", "path": path, "size": entry.size, "oid": entry.blob}
    if entry.sha256:
        one["lfs"] = {"oid": entry.sha256, "size": entry.size, "pointerSize": entry.pointer_size}
    return one


def folder(path: str) -> dict[str, Any]:
    return {"type": "directory", "path": path, "size": 0, "oid": hashlib.sha1(path.encode()).hexdigest()}


def tree(h: Handler) -> None:
    files, under = h.repo().find(h.names[5]).tree, "/".join(h.names[6:])
    prefix, deep = under + "/" if under else "", h.query.get("recursive", "").lower() in ("1", "true")
    found: dict[str, dict[str, Any]] = {}
    for path, entry in files.items():
        if not path.startswith(prefix):
            continue
        steps = path[len(prefix) :].split("/")
        for depth in range(1, len(steps) if deep else min(len(steps), 2)):
            name = prefix + "/".join(steps[:depth])
            found[name] = folder(name)
        if deep or len(steps) == 1:
            found[path] = described(path, entry)
    if under and not found:
        raise Refused(404, f"{under} does not exist on this revision", "EntryNotFound")
    listed = [found[path] for path in sorted(found)]
    start = int(h.query.get("cursor", "0"))
    stop, headers = start + h.hub.page_size, {}
    if stop < len(listed):
        following = f"{h.hub.url}{h.path.split('?')[0]}?recursive={str(deep).lower()}&cursor={stop}"
        headers["Link"] = f'<{following}>; rel="next"'
    h.json(listed[start:stop], headers=headers)


def paths_info(h: Handler) -> None:
    files, body = h.repo().find(h.names[5]).tree, h.body()
    paths = json.loads(body)["paths"] if body.startswith(b"{") else [one for one in _form(body) if one]
    found = []
    for path in paths:
        if path in files:
            found.append(described(path, files[path]))
        elif any(name.startswith(path.rstrip("/") + "/") for name in files):
            found.append(folder(path))
    h.json(found)


def _form(body: bytes) -> list[str]:
    from urllib.parse import parse_qs

    return parse_qs(body.decode()).get("paths", [])


def resolve(h: Handler) -> None:
    """A file: its headers, and its bytes from here or, for a large one, from the CDN's host."""
    repo = h.repo()
    at = h.names.index("resolve", 2)
    commit, path = repo.find(h.names[at + 1]), "/".join(h.names[at + 2 :])
    if path not in commit.tree:
        raise Refused(404, "Entry not found", "EntryNotFound")
    entry = commit.tree[path]
    headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{entry.etag}"'}
    if entry.sha256:
        headers |= {"X-Linked-Size": str(entry.size), "X-Linked-Etag": f'"{entry.sha256}"'}
        if h.hub.xet and (xet := h.hub.xet.find(entry.sha256)):
            route = f"{h.hub.url}/api/{repo.kind}s/{repo.name}/xet-read-token/{commit.oid}"
            headers |= {"X-Xet-Hash": xet.hash, "X-Xet-Refresh-Route": route}
        if h.hub.cdn:
            return h.reply(b"", 302, {**headers, "Location": h.hub.cdn_url(entry.sha256)})
    return h.send_content(entry.etag, headers)


def content(h: Handler) -> None:
    h.send_content(h.names[1], {"ETag": f'"{h.names[1]}"'})


# Uploads


def preupload(h: Handler) -> None:
    h.writer()
    commit, modes = h.repo().find(h.names[5]), []
    for one in h.asked()["files"]:
        mode = "lfs" if is_large(one["path"], one["size"], decode(one.get("sample") or "")) else "regular"
        have = commit.tree.get(one["path"])
        modes.append(
            {"path": one["path"], "uploadMode": mode, "shouldIgnore": False, "oid": have.etag if have else None}
        )
    h.json({"files": modes, "commitOid": commit.oid})


def lfs_batch(h: Handler) -> None:
    """Where each object is to be sent. One without actions is here already. Source: git-lfs, docs/api/batch.md."""
    h.writer()
    repo, asked = h.repo(), h.asked()
    objects, transfer = [], "xet" if h.hub.xet and "xet" in asked.get("transfers", []) else "basic"
    for one in asked["objects"]:
        told: dict[str, Any] = {"oid": one["oid"], "size": one["size"]}
        if not h.hub.state.content(one["oid"]).exists():
            href, upload = f"{h.hub.url}/content/{one['oid']}", {}
            if transfer != "xet" and one["size"] > h.hub.part_size and "multipart" in asked.get("transfers", []):
                transfer, count = "multipart", -(-one["size"] // h.hub.part_size)
                parts = {f"{number:05d}": f"{href}/part/{number}" for number in range(1, count + 1)}
                upload = {"href": f"{href}/complete", "header": {"chunk_size": str(h.hub.part_size), **parts}}
            told["actions"] = {
                "upload": upload or {"href": href},
                "verify": {"href": f"{h.page(repo)}.git/info/lfs/objects/verify"},
            }
        objects.append(told)
    h.json({"transfer": transfer, "objects": objects})


def put_content(h: Handler) -> None:
    made = h.hub.state.parts / f"{h.names[1]}.whole"
    sha256, md5 = h.receive(made)
    if sha256 != h.names[1]:
        raise Refused(400, "the content does not hash to its name")
    made.replace(h.hub.state.content(sha256))
    h.reply(headers={"ETag": f'"{md5}"'})


def put_part(h: Handler) -> None:
    _, md5 = h.receive(h.hub.state.parts / f"{h.names[1]}.{h.names[3]}")
    h.reply(headers={"ETag": f'"{md5}"'})


def complete(h: Handler) -> None:
    name, digest = h.names[1], hashlib.sha256()
    made = h.hub.state.parts / f"{name}.whole"
    with made.open("wb") as out:
        for part in sorted(h.asked()["parts"], key=lambda one: int(one["partNumber"])):
            data = (h.hub.state.parts / f"{name}.{part['partNumber']}").read_bytes()
            if part["etag"].strip('"') != hashlib.md5(data).hexdigest():
                raise Refused(400, f"part {part['partNumber']} is another")
            out.write(data)
            digest.update(data)
    if digest.hexdigest() != name:
        raise Refused(400, "the parts do not hash to the object's name")
    made.replace(h.hub.state.content(name))
    h.json({})


def lfs_verify(h: Handler) -> None:
    asked = h.asked()
    path = h.hub.state.content(asked["oid"])
    if not path.exists() or path.stat().st_size != asked["size"]:
        raise Refused(404, "object is not there, or of another size")
    h.json({})


def commit(h: Handler) -> None:
    """All lines of one commit, or none: added text, references to large files, deletions."""
    h.writer()
    repo, state = h.repo(), h.hub.state
    if h.names[5] not in repo.refs:
        raise Refused(404, f"Invalid rev id: {h.names[5]}", "RevisionNotFound")
    head: dict[str, Any] = {}
    added: dict[str, Entry] = {}
    deleted: list[str] = []
    body = h.body()
    h.seen.received += len(body)
    for line in body.splitlines():
        key, value = (one := json.loads(line))["key"], one["value"]
        if key == "header":
            head = value
        elif key == "file":
            added[value["path"]] = state.store(decode(value["content"]))
        elif key == "lfsFile":
            if not state.content(value["oid"]).exists() and h.hub.xet:
                h.hub.xet.copy(value["oid"], state.content(value["oid"]))
            if not state.content(value["oid"]).exists():
                raise Refused(400, f"{value['path']}: its content was never uploaded")
            added[value["path"]] = state.large(value["oid"])
        elif key in ("deletedFile", "deletedFolder"):
            deleted.append(value["path"])
        else:
            raise Refused(400, f"unknown line {key}")
    ref, answer = h.names[5], {}
    if h.query.get("create_pr"):
        pull = state.open_pull(repo, head["summary"])
        ref, answer = f"refs/pr/{pull.number}", {"pullRequestUrl": f"{h.page(repo)}/discussions/{pull.number}"}
    made = state.commit(
        repo, ref, head["summary"], head.get("description", ""), added, deleted, head.get("parentCommit")
    )
    h.json({"success": True, "commitOid": made.oid, "commitUrl": f"{h.page(repo)}/commit/{made.oid}", **answer})


# Pull requests


def one_pull(h: Handler) -> tuple[Repo, Pull]:
    repo = h.repo()
    return repo, repo.pull(int(h.names[5]))


def listed_pull(repo: Repo, pull: Pull, user: str) -> dict[str, Any]:
    return {
        "num": pull.number,
        "title": pull.title,
        "status": pull.status,
        "isPullRequest": True,
        "author": {"name": user},
        "repo": {"name": repo.name, "type": repo.kind},
        "createdAt": "2026-01-01T00:00:00.000Z",
    }


def open_discussion(h: Handler) -> None:
    h.writer()
    asked, repo = h.asked(), h.repo()
    if not asked.get("pullRequest"):
        raise Refused(501, "this Hub has pull requests only")
    h.json({"num": h.hub.state.open_pull(repo, asked["title"]).number})


def discussions(h: Handler) -> None:
    repo = h.repo()
    listed = [listed_pull(repo, pull, h.hub.user) for pull in reversed(repo.pulls)]
    if (status := h.query.get("status", "all")) != "all":
        listed = [one for one in listed if (one["status"] in ("draft", "open")) == (status == "open")]
    h.json({"discussions": listed, "count": len(listed), "start": 0})


def discussion(h: Handler) -> None:
    repo, pull = one_pull(h)
    changes = {"base": "refs/heads/main", "mergeCommitId": pull.merged_as}
    rest = {"events": [], "filesWithConflicts": [], "changes": changes, "diff": ""}
    h.json({**listed_pull(repo, pull, h.hub.user), **rest})


def set_status(h: Handler) -> None:
    h.writer()
    _, pull = one_pull(h)
    pull.status = h.asked()["status"]
    event = {"id": "1", "type": "status-change", "createdAt": "2026-01-01T00:00:00.000Z", "author": {"name": "tester"}}
    h.json({"newStatus": {**event, "data": {"status": pull.status}}})


def merge(h: Handler) -> None:
    h.writer()
    h.body()
    repo, _ = one_pull(h)
    h.json({"mergeCommitId": h.hub.state.merge(repo, int(h.names[5])).merged_as})


def xet_token(h: Handler) -> None:
    if h.hub.xet is None:
        raise Refused(501, "this Hub has no Xet storage")
    if h.names[4] == "xet-write-token":
        h.writer()
    h.repo()
    url, until = h.hub.xet.url, int(time.time()) + 3600
    headers = {"X-Xet-Cas-Url": url, "X-Xet-Access-Token": "xet", "X-Xet-Token-Expiration": str(until)}
    h.json({"casUrl": url, "accessToken": "xet", "exp": until}, headers=headers)


ROUTES: dict[tuple[str, str], Callable[[Handler], None]] = {
    ("GET", "whoami-v2"): whoami,
    ("POST", "validate-yaml"): validate_yaml,
    ("POST", "repos/create"): create_repo,
    ("DELETE", "repos/delete"): delete_repo,
    ("GET", "info"): info,
    ("GET", "revision"): info,
    ("GET", "refs"): refs,
    ("GET", "commits"): commits,
    ("POST", "branch"): branch,
    ("POST", "tag"): tag,
    ("GET", "tree"): tree,
    ("POST", "paths-info"): paths_info,
    ("GET", "resolve"): resolve,
    ("GET", "content"): content,
    ("POST", "preupload"): preupload,
    ("POST", "lfs-batch"): lfs_batch,
    ("POST", "lfs-verify"): lfs_verify,
    ("PUT", "content"): put_content,
    ("PUT", "content-part"): put_part,
    ("POST", "content-complete"): complete,
    ("POST", "commit"): commit,
    ("POST", "discussions"): open_discussion,
    ("GET", "discussions"): discussions,
    ("GET", "discussion"): discussion,
    ("POST", "discussion-status"): set_status,
    ("POST", "discussion-merge"): merge,
    ("GET", "xet-token"): xet_token,
}
