"""A W&B server on the loopback, as far as `wandb sync` and boards need one."""

from __future__ import annotations

import gzip
import json
import re
import socket
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lmbench.wandb import publish
from lmbench.wandb.publish import Ended

# As long as a real one; it opens nothing.
PLANTED_KEY = "planted0key0" * 4


class Server(ThreadingHTTPServer):
    """Answers like W&B, which knows a project `lmbench`, and keeps what it was sent.

    Args:
        status: answer every question of a client (not every request) with this instead.
        upload_status: answer the upload of steps with this.

    `questions` are the GraphQL operations; `history` are the steps by run, `config`, `summary` and `filed` (how it was
    to be filed) likewise; `artifacts` are names, `authorizations` the credentials seen, `views` workspaces as they are
    there now. While it is open, WANDB_BASE_URL names it.
    """

    daemon_threads = True

    def __init__(self, status=200, upload_status=200):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status, self.upload_status = status, upload_status
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.questions, self.artifacts, self.views, self.authorizations = [], [], [], set()
        self.history, self.config, self.filed = defaultdict(list), defaultdict(dict), defaultdict(dict)
        self.summary = {}
        self._lock = threading.Lock()

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self._variables = pytest.MonkeyPatch()
        self._variables.setenv("WANDB_BASE_URL", self.url)
        return self

    def __exit__(self, *_):
        self._variables.undo()
        self.shutdown()
        self.server_close()

    def handle_error(self, *_):
        """A client that goes away is none of the test's matter."""

    def answer(self, path, body):
        """Status and content of the answer to a request."""
        with self._lock:
            if path == "/graphql":
                return self.status, {"data": self._graphql(json.loads(body))}
            if path.endswith("/file_stream"):
                if self.upload_status == 200:
                    self._stream(path.split("/")[-2], json.loads(body).get("files") or {})
                return self.upload_status, {}
        return 200, {}

    def _stream(self, run_id, files):
        for name, file in files.items():
            rows = [json.loads(line) for line in file["content"]] if name.endswith((".json", ".jsonl")) else []
            if name == "wandb-history.jsonl":
                self.history[run_id] += rows
            elif name == "wandb-summary.json":
                self.summary[run_id] = rows[-1]

    def _graphql(self, question):
        # Some clients tell the name in the text only.
        named = re.match(r"\s*(?:query|mutation)\s+(\w+)", question.get("query") or "")
        name, given = question.get("operationName") or (named[1] if named else ""), question.get("variables") or {}
        self.questions.append(name)
        answer = {}
        match name:
            case "UpsertBucket":
                run, config = given["name"], json.loads(given.get("config") or "{}")
                self.filed[run] |= {key: value for key, value in given.items() if value is not None}
                self.config[run] |= {key: item["value"] for key, item in config.items()}
                project = {"name": given.get("project"), "entity": {"name": given.get("entity") or "me"}}
                answer = {"upsertBucket": {"bucket": {"name": run, "project": project}}}
            case "CreateArtifact":
                self.artifacts.append(given["input"]["artifactCollectionName"])
                answer = {"createArtifact": {"artifact": {"id": "a", "state": "COMMITTED"}}}
            case "CreateRunFiles":
                files = [{"name": file, "uploadUrl": f"{self.url}/put/{file}"} for file in given["files"]]
                answer = {"createRunFiles": {"runID": given["run"], "files": files}}
            case "Viewer" | "GetDefaultEntity":
                answer = {"viewer": {"id": "u", "entity": "me"}}
            case "View":
                views = [view for view in self.views if view["name"] == given["viewName"]]
                nodes = [{"node": {**view, "spec": json.dumps(view["spec"])}} for view in views]
                answer = {"project": {"allViews": {"edges": nodes}} if given["projectName"] == "lmbench" else None}
            case "UpsertView2":
                # By its id where there is one, as W&B does; another of the same name is another view.
                view = next((view for view in self.views if view["id"] == given.get("id")), None)
                if view is None:
                    view = {"id": f"Vmlldzo{len(self.views)}=="}
                    self.views.append(view)
                view |= {**given, "id": view["id"], "spec": json.loads(given["spec"])}
                answer = {"upsertView": {"view": {"id": view["id"], "name": view["name"]}, "inserted": True}}
        return answer


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.authorizations.add(self.headers.get("authorization") or "")
        status, content = self.server.answer(self.path, body)
        told = json.dumps(content if status == 200 else {"error": "no"}).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)

    do_GET = do_PUT = do_POST

    def log_message(self, *_):
        """Nothing on the test's output."""


def keys_of(board):
    """Every key that a panel of a board or its table of runs names."""
    return {*board.columns, *(key for panels in board.sections.values() for panel in panels for key in panel.y)}


class SilentServer:
    """Accepts every connection and never answers. While it is open, WANDB_BASE_URL names it."""

    def __enter__(self):
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._variables = pytest.MonkeyPatch()
        self._variables.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{self._socket.getsockname()[1]}")

    def __exit__(self, *_):
        self._variables.undo()
        self._socket.close()


def replace_wandb(monkeypatch):
    """wandb's own programs are not run, and an upload leaves wandb's mark; returns the list of the words for them."""
    sent = []

    def run_module(module, words, timeout_s):
        sent.append([module, *words])
        if module == "wandb":
            run = Path(words[-1]) / "offline-run-1"
            run.mkdir(parents=True, exist_ok=True)
            (run / "run-1.wandb.synced").touch()
        return Ended(0, [], timeout_s)

    monkeypatch.setattr(publish, "run_module", run_module)
    return sent


def closed_port_url():
    """An address on the loopback at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return f"http://127.0.0.1:{found.getsockname()[1]}"
