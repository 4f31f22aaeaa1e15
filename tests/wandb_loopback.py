"""A W&B server on the loopback, as far as `wandb sync` needs one, and an independent reader of W&B's offline files."""

from __future__ import annotations

import gzip
import json
import socket
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

# As long as a real one; it opens nothing.
PLANTED_KEY = "planted0key0" * 4


class Server:
    """Answers like W&B and keeps what it was sent.

    Args:
        status: answer every question of a client (not every request) with this instead.
        upload_status: answer the upload of steps with this.

    `questions` are the GraphQL operations, `history` the steps by run, `config` and `summary` likewise,
    `authorizations` the credentials seen.
    """

    def __init__(self, status: int = 200, upload_status: int = 200) -> None:
        self.status, self.upload_status = status, upload_status
        self.questions: list[str] = []
        self.history: dict[str, list[dict[str, Any]]] = {}
        self.config: dict[str, dict[str, Any]] = {}
        self.summary: dict[str, dict[str, Any]] = {}
        self.artifacts: list[str] = []
        self.authorizations: set[str] = set()
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"wandb": self})
        self._http = _Quiet(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> Server:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def graphql(self, question: dict[str, Any]) -> dict[str, Any]:
        name, given = question.get("operationName") or "", question.get("variables") or {}
        with self._lock:
            self.questions.append(name)
            if name == "UpsertBucket":
                config = json.loads(given.get("config") or "{}")
                known = self.config.setdefault(given["name"], {})
                known.update({key: item["value"] for key, item in config.items()})
                return {"upsertBucket": {"bucket": _bucket(given), "inserted": True}}
            if name == "CreateArtifact":
                self.artifacts.append(given["input"]["artifactCollectionName"])
                artifact = {"id": "a", "state": "COMMITTED", "artifactSequence": {"latestArtifact": {"id": "a"}}}
                return {"createArtifact": {"artifact": artifact}}
            if name == "CreateRunFiles":
                files = [{"name": f, "uploadUrl": f"{self.url}/put/{f}"} for f in given["files"]]
                return {"createRunFiles": {"runID": given["run"], "uploadHeaders": [], "files": files}}
        return {}

    def stream(self, run_id: str, sent: dict[str, Any]) -> None:
        files = sent.get("files") or {}
        with self._lock:
            history = files.get("wandb-history.jsonl") or {"content": []}
            self.history.setdefault(run_id, []).extend(json.loads(line) for line in history["content"])
            for line in (files.get("wandb-summary.json") or {"content": []})["content"]:
                self.summary[run_id] = json.loads(line)


def _bucket(given: dict[str, Any]) -> dict[str, Any]:
    project = {"id": "p", "name": given.get("project"), "entity": {"id": "e", "name": given.get("entity") or "me"}}
    return {
        "id": "b", "name": given["name"], "displayName": given.get("displayName"), "description": "", "config": "{}",
        "sweepName": None, "historyLineCount": 0, "project": project,
    }  # fmt: skip


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that goes away is none of the test's matter."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wandb: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.wandb.authorizations.add(self.headers.get("authorization") or "")
        if self.path == "/graphql":
            self._answer({"data": self.wandb.graphql(json.loads(body))}, self.wandb.status)
        elif self.path.endswith("/file_stream"):
            if self.wandb.upload_status == 200:
                self.wandb.stream(self.path.split("/")[-2], json.loads(body))
            self._answer({"exitcode": None, "limits": {}}, self.wandb.upload_status)
        else:
            self._answer({}, 200)

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self._answer({}, 200)

    def do_GET(self) -> None:
        self._answer({}, 200)

    def _answer(self, content: dict[str, Any], status: int) -> None:
        body = json.dumps(content if status == 200 else {"error": "no"}).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing on the test's output."""


class SilentServer:
    """Accepts every connection and never answers."""

    def __enter__(self) -> SilentServer:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def closed_port_url() -> str:
    """An address on the loopback at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return f"http://127.0.0.1:{found.getsockname()[1]}"


class Offline:
    """What a .wandb file holds: `history`, `summary`, `config`, `tables` (of files beside it), `artifacts`, `raw`."""

    def __init__(self, file: Path) -> None:
        self.raw = file.read_bytes()
        self.history: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.config: dict[str, Any] = {}
        self.artifacts: dict[str, list[str]] = {}
        self.step_metric: dict[str, str] = {}
        for record in _records(self.raw):
            self._take(record, record.WhichOneof("record_type"))

    def _take(self, record: Any, kind: str) -> None:
        if kind == "history":
            self.history.append({_name(item): json.loads(item.value_json) for item in record.history.item})
        elif kind == "summary":
            self.summary.update({_name(item): json.loads(item.value_json) for item in record.summary.update})
        elif kind == "run":
            self.run = record.run
            self.config.update({_name(item): json.loads(item.value_json) for item in record.run.config.update})
        elif kind == "config":
            self.config.update({_name(item): json.loads(item.value_json) for item in record.config.update})
        elif kind == "metric":
            self.step_metric[record.metric.glob_name or record.metric.name] = record.metric.step_metric
        elif kind == "artifact":
            self.artifacts[record.artifact.name] = [entry.path for entry in record.artifact.manifest.contents]


def _name(item: Any) -> str:
    return ".".join(item.nested_key) or item.key


def _records(data: bytes) -> Iterator[Any]:
    """LevelDB's log format after a head of 7 bytes: blocks of 32 KiB, pieces of (checksum, length, kind, bytes)."""
    from wandb.proto import wandb_internal_pb2 as pb

    assert data[:4] == b":W&B"
    place, buffer = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        if kind == 0 and length == 0:
            break
        buffer += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            record = pb.Record()
            record.ParseFromString(buffer)
            buffer = b""
            yield record
