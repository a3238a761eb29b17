"""A small Hugging Face hub in a thread: the endpoints that huggingface_hub calls for a data set, and faults on demand."""

import contextlib
import hashlib
import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass
class FakeHub:
    """What the server holds and what it was asked. `faults[path]` are taken one an answer: see `_Handler._bytes`."""

    repository: str
    files: dict[str, bytes]
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    in_git: set[str] = field(default_factory=set)  # small files, which have no SHA-256 on the hub
    page: int = 3
    refusal: tuple[int, dict[str, str]] | None = None  # of everything
    closed: tuple[int, dict[str, str]] | None = None  # of the files alone
    faults: dict[str, list[tuple]] = field(default_factory=lambda: defaultdict(list))
    asked: list[tuple[str, str | None]] = field(default_factory=list)  # path and Range
    tokens: list[tuple[str, str | None]] = field(default_factory=list)  # path and Authorization
    url: str = ""
    other_host: str = ""

    def ranges(self, path: str) -> list[str | None]:
        """The Range of each request for the bytes of `path`."""
        return [asked for address, asked in self.asked if address == f"/cdn/{sha256(self.files[path])}"]

    @contextlib.contextmanager
    def serving(self) -> Iterator["FakeHub"]:
        server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url, self.other_host = (f"http://{host}:{server.server_port}" for host in ("127.0.0.1", "localhost"))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), ConnectionError):  # a client that hangs up is part of the tests
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        hub, address = self.hub, urlsplit(self.path)
        path = unquote(address.path)
        hub.asked.append((path, self.headers.get("Range")))
        hub.tokens.append((path, self.headers.get("Authorization")))
        api, resolve = f"/api/datasets/{hub.repository}", f"/datasets/{hub.repository}/resolve/"
        if hub.refusal is not None:
            self._answer(hub.refusal[0], b"{}", hub.refusal[1])
        elif path.startswith(f"{api}/revision/"):
            self._revision(path.removeprefix(f"{api}/revision/"))
        elif path.startswith(f"{api}/tree/"):
            self._tree(path.removeprefix(f"{api}/tree/"), parse_qs(address.query))
        elif path.startswith(resolve):
            self._resolve(*path.removeprefix(resolve).split("/", 1))
        elif path.startswith("/cdn/"):
            self._bytes(next(name for name, content in hub.files.items() if sha256(content) == path.removeprefix("/cdn/")))
        else:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _commit(self, revision: str) -> str | None:
        return revision if revision in self.hub.revisions.values() else self.hub.revisions.get(revision)

    def _revision(self, revision: str) -> None:
        commit = self._commit(revision)
        if commit is None:
            self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        self._answer(200, json.dumps({"id": self.hub.repository, "sha": commit}).encode(), {"Content-Type": "application/json"})

    def _tree(self, revision: str, query: dict[str, list[str]]) -> None:
        if self._commit(revision) is None or query.get("recursive") != ["true"]:
            self._answer(400, b"{}", {})
            return
        names, first = sorted(self.hub.files), int(query.get("cursor", ["0"])[0])
        entries = [{"type": "directory", "path": "folder", "oid": "0" * 40, "size": 0}] if not first else []
        for name in names[first : first + self.hub.page]:
            content = self.hub.files[name]
            entry = {
                "type": "file",
                "path": name,
                "size": len(content),
                "oid": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(),
            }
            if name not in self.hub.in_git:
                entry["lfs"] = {"oid": sha256(content), "size": len(content), "pointerSize": 134}
            entries.append(entry)
        headers = {"Content-Type": "application/json"}
        if first + self.hub.page < len(names):
            following = f"{self.hub.url}{urlsplit(self.path).path}?recursive=true&expand=false&cursor={first + self.hub.page}"
            headers["Link"] = f'<{following}>; rel="next"'
        self._answer(200, json.dumps(entries).encode(), headers)

    def _resolve(self, revision: str, name: str) -> None:
        if self.hub.closed is not None:
            self._answer(self.hub.closed[0], b"{}", self.hub.closed[1])
            return
        digest = sha256(self.hub.files[name])
        size = str(len(self.hub.files[name]))
        linked = {"X-Repo-Commit": revision, "X-Linked-Etag": f'"{digest}"', "X-Linked-Size": size}
        self._answer(302, b"", linked | {"Location": f"{self.hub.other_host}/cdn/{digest}"})

    def _bytes(self, name: str) -> None:
        """Faults: ("status", number, headers), ("cut", n), ("slow", n, seconds), ("corrupt",), ("whole",), ("shifted",)."""
        content, headers, status = self.hub.files[name], {"ETag": f'"{sha256(self.hub.files[name])}"'}, 200
        fault = self.hub.faults[name].pop(0) if self.hub.faults[name] else ("none",)
        if fault[0] == "status":
            self._answer(fault[1], b"", fault[2])
            return
        if fault[0] == "corrupt":
            content = content[:-1] + bytes([content[-1] ^ 1])
        asked = self.headers.get("Range")
        if asked is not None and fault[0] != "whole":
            first = int(asked.removeprefix("bytes=").rstrip("-"))
            shown = first + 1 if fault[0] == "shifted" else first
            headers["Content-Range"], status = f"bytes {shown}-{len(content) - 1}/{len(content)}", 206
            content = content[first:]
        if fault[0] not in ("cut", "slow"):
            self._answer(status, content, headers)
            return
        self._answer(status, content[: fault[1]], headers | {"Content-Length": str(len(content))})
        self.wfile.flush()
        if fault[0] == "slow":
            time.sleep(fault[2])
        self.close_connection = True
