"""A stand-in for the Hub on the loopback interface: the calls of a publication and a download, and faults to order.

It keeps repositories in memory. What it does not know it answers with 404 and notes in `unknown`, so that a test
notices a client that has begun to ask for something else.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Fault:
    """What goes wrong with the next `times` calls that match: an answer, a broken connection, or damaged bytes."""

    method: str
    path: str  # regular expression, searched
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    times: int = 1
    drop: bool = False
    hang: float = 0.0  # seconds without an answer
    corrupt: bool = False


@dataclass
class Repo:
    """Commits, oldest first; each is the whole tree as path → content."""

    private: bool
    trees: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"0" * 40: {}})
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def sha(self) -> str:
        return list(self.trees)[-1]

    @property
    def files(self) -> dict[str, bytes]:
        return self.trees[self.sha]


class Hub(ThreadingHTTPServer):
    """`with Hub() as hub:` serves at `hub.url`; without a token nobody may write."""

    daemon_threads = True

    def __init__(self, token: str = "hf_right") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url, self.token = f"http://127.0.0.1:{self.server_address[1]}", token
        self.repos: dict[str, Repo] = {}
        self.lfs: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.calls: list[tuple[str, str]] = []
        self.unknown: list[tuple[str, str]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def server_close(self) -> None:
        self.shutdown()
        super().server_close()

    def add(self, repo_id: str, **files: bytes) -> None:
        """A repository that someone else made; `__` in a name stands for the dot."""
        self.repos[repo_id] = Repo(False, {"1" * 40: {k.replace("__", "."): v for k, v in files.items()}})

    def sent(self, method: str, path: str) -> int:
        """How many such calls there were."""
        return sum(call == method and re.search(path, at) is not None for call, at in self.calls)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_GET

    def _serve(self) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        hub.calls.append((self.command, path))
        fault = next(
            (f for f in hub.faults if f.times and f.method == self.command and re.search(f.path, path)), None
        )
        if fault:
            fault.times -= 1
            if fault.drop and self.command != "GET":
                self.rfile.read(1000)
                return self._break()
        body = self._body()
        if fault and fault.hang:
            time.sleep(fault.hang)
            return self._break()
        if fault and fault.status:
            return self._answer(fault.status, {"error": "as ordered"}, fault.headers)
        signed = self.headers.get("Authorization") == f"Bearer {hub.token}"
        if self.command in ("POST", "PUT") and not signed and not path.startswith("/lfs/"):
            return self._answer(401, {"error": "Invalid username or password."})
        if path.startswith("/lfs/") and self.command == "PUT":
            right = hashlib.sha256(body).hexdigest() == path.removeprefix("/lfs/")
            hub.lfs.update({path.removeprefix("/lfs/"): body} if right else {})
            return self._answer(200 if right else 400, {})
        for pattern, answer in _ROUTES:
            found = re.fullmatch(pattern, f"{self.command} {path}")
            if found:
                return answer(self, signed, fault, body, *found.groups())
        hub.unknown.append((self.command, path))
        self._answer(404, {"error": "no such call"})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _break(self) -> None:
        self.close_connection = True
        self.connection.shutdown(2)

    def _answer(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else data)

    def _create(self, signed: bool, fault: Any, body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        known = name in self.server.repos
        private = bool(asked.get("private")) or asked.get("visibility") == "private"
        self.server.repos.setdefault(name, Repo(private))
        self._answer(409 if known else 200, {"url": f"{self.server.url}/{name}", "name": name})

    def _about(self, signed: bool, fault: Any, body: bytes, name: str) -> None:
        repo = self.server.repos.get(name)
        if repo is None or (repo.private and not signed):
            return self._answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        self._answer(200, {"id": name, "sha": repo.sha, "private": repo.private, "siblings": _names(repo)})

    def _tree(self, signed: bool, fault: Any, body: bytes, name: str) -> None:
        files = self.server.repos[name].files
        self._answer(
            200, [{"type": "file", "path": k, "size": len(v), "oid": "0" * 40} for k, v in files.items()]
        )

    def _preupload(self, signed: bool, fault: Any, body: bytes, name: str) -> None:
        answer = []
        for file in json.loads(body)["files"]:
            large = file["path"].endswith((".safetensors", ".png"))
            content = self.server.repos[name].files.get(file["path"])
            git = hashlib.sha1(b"blob %d\0" % len(content or b"") + (content or b"")).hexdigest()
            oid = hashlib.sha256(content or b"").hexdigest() if large else git
            mode = {"uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            answer.append({"path": file["path"], **mode, "oid": None if content is None else oid})
        self._answer(200, {"files": answer})

    def _batch(self, signed: bool, fault: Any, body: bytes, name: str) -> None:
        url, objects = self.server.url, []
        for asked in json.loads(body)["objects"]:
            upload = {"upload": {"href": f"{url}/lfs/{asked['oid']}"}, "verify": {"href": f"{url}/verify"}}
            known = asked["oid"] in self.server.lfs
            objects.append({**asked, **({} if known else {"actions": upload})})
        self._answer(200, {"objects": objects, "transfer": "basic"})

    def _commit(self, signed: bool, fault: Any, body: bytes, name: str) -> None:
        repo = self.server.repos[name]
        tree = dict(repo.files)
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                tree[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                tree[value["path"]] = self.server.lfs[value["oid"]]
            elif line["key"] == "deletedFile":
                del tree[value["path"]]
        sha = hashlib.sha1(repo.sha.encode() + body).hexdigest()
        repo.trees[sha] = tree
        self._answer(200, {"commitUrl": f"{self.server.url}/{name}/commit/{sha}", "commitOid": sha})

    def _resolve(self, signed: bool, fault: Any, body: bytes, name: str, revision: str, path: str) -> None:
        repo = self.server.repos.get(name)
        if repo is None or (repo.private and not signed):
            return self._answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        sha = repo.sha if revision == "main" else repo.tags.get(revision, revision)
        if sha not in repo.trees:
            return self._answer(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
        content = repo.trees[sha].get(path)
        if content is None:
            return self._answer(404, {}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha})
        etag = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": sha}
        if fault and fault.corrupt:
            content = content[:-1] + bytes([content[-1] ^ 1])
        if fault and fault.drop:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            return self._break()
        self._answer(200, content, etag)

    def _tag(self, signed: bool, fault: Any, body: bytes, name: str, revision: str) -> None:
        tags, tag = self.server.repos[name].tags, json.loads(body)["tag"]
        known = tag in tags
        tags.setdefault(tag, revision)
        self._answer(409 if known else 200, {})

    def _fine(self, signed: bool, fault: Any, body: bytes) -> None:
        self._answer(200, {"errors": [], "warnings": []})


def _names(repo: Repo) -> list[dict[str, str]]:
    return [{"rfilename": name} for name in repo.files]


_ROUTES = (
    (r"POST /api/repos/create", _Handler._create),
    (r"POST /api/validate-yaml", _Handler._fine),
    (r"POST /verify", _Handler._fine),
    (r"GET /api/(?:models|spaces)/([^/]+/[^/]+)", _Handler._about),
    (r"GET /api/(?:models|spaces)/([^/]+/[^/]+)/revision/main", _Handler._about),
    (r"GET /api/(?:models|spaces)/([^/]+/[^/]+)/tree/main", _Handler._tree),
    (r"POST /api/(?:models|spaces)/([^/]+/[^/]+)/preupload/main", _Handler._preupload),
    (r"POST /api/(?:models|spaces)/([^/]+/[^/]+)/commit/main", _Handler._commit),
    (r"POST /api/models/([^/]+/[^/]+)/tag/([^/]+)", _Handler._tag),
    (r"POST /(?:spaces/)?([^/]+/[^/]+)\.git/info/lfs/objects/batch", _Handler._batch),
    (r"(?:GET|HEAD) /([^/]+/[^/]+)/resolve/([^/]+)/(.+)", _Handler._resolve),
)
