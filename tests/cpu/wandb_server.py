"""A stand-in for wandb's server, as far as `wandb sync` and an online run speak to it: keeps each run's rows by their place in its file.

It answers what wandb 0.31 asks, so that its real client can be seen to put the parts of one run behind each other.
"""

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class StoredRun:
    history: dict[int, dict] = field(default_factory=dict)
    """Row by its place in the file, as the client names it."""
    summary: dict = field(default_factory=dict)
    described: dict = field(default_factory=dict)
    """Group, job type, tags, config and the rest, as last told."""


class WandbServer(ThreadingHTTPServer):
    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.runs: dict[str, StoredRun] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    server = WandbServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WandbServer

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        self._answer({})

    def do_PUT(self) -> None:
        self._body()
        self._answer({})

    def do_POST(self) -> None:
        data = self._body()
        if self.path.startswith("/graphql"):
            asked = json.loads(data)
            self._answer({"data": self._graphql(asked.get("query", ""), asked.get("variables") or {})})
        elif self.path.endswith("/file_stream"):
            self._stream(self.server.runs.setdefault(self.path.split("/")[-2], StoredRun()), json.loads(data))
            self._answer({"exitcode": None, "limits": {}})
        else:
            self._answer({})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data

    def _answer(self, what: dict) -> None:
        body = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, run: StoredRun, body: dict) -> None:
        for name, part in (body.get("files") or {}).items():
            if name == "wandb-history.jsonl":
                run.history.update({part["offset"] + i: json.loads(line) for i, line in enumerate(part["content"])})
            elif name == "wandb-summary.json":
                run.summary.update(json.loads(part["content"][0]))

    def _graphql(self, query: str, given: dict) -> dict:
        project = {"id": "cA==", "name": given.get("project") or "p", "entity": {"id": "ZQ==", "name": given.get("entity") or "someone"}}
        if "upsertBucket" in query:
            name = given["name"]
            inserted = name not in self.server.runs
            run = self.server.runs.setdefault(name, StoredRun())
            run.described.update({key: value for key, value in given.items() if value is not None})
            bucket = {"id": "aWQ=", "name": name, "displayName": given.get("displayName") or name, "project": project, "sweepName": None}
            return {"upsertBucket": {"bucket": bucket | {"historyLineCount": len(run.history)}, "inserted": inserted}}
        if "RunResumeStatus" in query:
            return {"model": project | {"bucket": _resumed(given["name"], self.server.runs.get(given["name"]))}}
        if "createRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.server.url}/upload"} for name in given["files"]]
            return {"createRunFiles": {"runID": "aWQ=", "uploadHeaders": [], "files": files}}
        who = {"id": "dg==", "entity": "someone", "username": "someone", "email": "", "flags": "{}", "teams": {"edges": []}}
        return {"viewer": who, "serverInfo": {"features": [], "cliVersionInfo": {"max_cli_version": "9"}, "latestLocalVersionInfo": None}}


def _resumed(name: str, run: StoredRun | None) -> dict | None:
    """What the server tells about a run that a client resumes."""
    if run is None:
        return None
    tail = [json.dumps(run.history[place]) for place in sorted(run.history)[-1:]]
    config = run.described.get("config") or "{}"
    started = json.loads(config).get("_wandb", {}).get("value", {}).get("t")  # without this the client takes the run for a new one
    return {
        "id": "aWQ=", "name": name, "displayName": name, "summaryMetrics": json.dumps(run.summary), "logLineCount": 0,
        "historyLineCount": len(run.history), "eventsLineCount": 0, "historyTail": json.dumps(tail), "eventsTail": "[]",
        "config": config, "wandbConfig": json.dumps({"t": started}), "tags": run.described.get("tags"),
    }  # fmt: skip
