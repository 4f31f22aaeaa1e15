"""A W&B server on the loopback, as far as `wandb sync` and boards need one."""

from __future__ import annotations

import gzip
import json
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# As long as a real one; it opens nothing.
PLANTED_KEY = "planted0key0" * 4


class Server:
    """Answers like W&B and keeps what it was sent.

    Args:
        status: answer every question of a client (not every request) with this instead.
        upload_status: answer the upload of steps with this.

    `questions` are the GraphQL operations; `history` are the steps by run, `config`, `summary` and `filed` (how it was
    to be filed) likewise; `tables` are tables by file name, `artifacts` names, `authorizations` the credentials seen.
    `views` are workspaces as they are there now, `projects` those that it knows.
    """

    def __init__(self, status=200, upload_status=200):
        self.status, self.upload_status = status, upload_status
        self.questions = []
        self.history = {}
        self.config = {}
        self.summary = {}
        self.filed = {}
        self.tables = {}
        self.artifacts = []
        self.authorizations = set()
        self.projects = {"lmbench"}
        self.views = []
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"wandb": self})
        self._http = _Quiet(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self):
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._http.shutdown()
        self._http.server_close()

    def graphql(self, question):
        # Some clients tell the name in the text only.
        named = re.match(r"\s*(?:query|mutation)\s+(\w+)", question.get("query") or "")
        name, given = question.get("operationName") or (named[1] if named else ""), question.get("variables") or {}
        answers = {
            "UpsertBucket": self._bucket,
            "CreateArtifact": self._artifact,
            "CreateRunFiles": self._files,
            "Viewer": self._viewer,
            "GetDefaultEntity": self._viewer,
            "View": self._view,
            "UpsertView2": self._upsert,
        }
        with self._lock:
            self.questions.append(name)
            return answers[name](given) if name in answers else {}

    def _bucket(self, given):
        config = json.loads(given.get("config") or "{}")
        told = {key: value for key, value in given.items() if value is not None}
        self.filed.setdefault(given["name"], {}).update(told)
        known = self.config.setdefault(given["name"], {})
        known.update({key: item["value"] for key, item in config.items()})
        return {"upsertBucket": {"bucket": _bucket(given), "inserted": True}}

    def _artifact(self, given):
        self.artifacts.append(given["input"]["artifactCollectionName"])
        artifact = {"id": "a", "state": "COMMITTED", "artifactSequence": {"latestArtifact": {"id": "a"}}}
        return {"createArtifact": {"artifact": artifact}}

    def _files(self, given):
        files = [{"name": f, "uploadUrl": f"{self.url}/put/{f}"} for f in given["files"]]
        return {"createRunFiles": {"runID": given["run"], "uploadHeaders": [], "files": files}}

    def _viewer(self, _):
        return {"viewer": {"id": "u", "entity": "me", "username": "me", "email": "", "flags": "{}", "teams": None}}

    def _view(self, asked):
        if asked["projectName"] not in self.projects:
            return {"project": None}
        views = [view for view in self.views if view["name"] == asked["viewName"]]
        nodes = [{"node": {**view, "spec": json.dumps(view["spec"])}} for view in views]
        return {"project": {"allViews": {"edges": nodes}}}

    def _upsert(self, given):
        """By its id where there is one, as W&B does; another of the same name is another view."""
        view = next((view for view in self.views if view["id"] == given.get("id")), None)
        if view is None:
            view = {"id": f"Vmlldzo{len(self.views)}=="}
            self.views.append(view)
        view |= {**given, "id": view["id"], "spec": json.loads(given["spec"])}
        return {"upsertView": {"view": {"id": view["id"], "name": view["name"]}, "inserted": "id" not in given}}

    def stream(self, run_id, sent):
        files = sent.get("files") or {}
        with self._lock:
            history = files.get("wandb-history.jsonl") or {"content": []}
            self.history.setdefault(run_id, []).extend(json.loads(line) for line in history["content"])
            for line in (files.get("wandb-summary.json") or {"content": []})["content"]:
                self.summary[run_id] = json.loads(line)


def _bucket(given):
    project = {"id": "p", "name": given.get("project"), "entity": {"id": "e", "name": given.get("entity") or "me"}}
    return {
        "id": "b", "name": given["name"], "displayName": given.get("displayName"), "description": "", "config": "{}",
        "sweepName": None, "historyLineCount": 0, "project": project,
    }  # fmt: skip


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        """A client that goes away is none of the test's matter."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wandb: Server

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.wandb.authorizations.add(self.headers.get("authorization") or "")
        if self.path == "/graphql":
            try:
                answer = {"data": self.wandb.graphql(json.loads(body))}
            except ValueError as error:
                answer = {"data": None, "errors": [{"message": str(error)}]}
            self._answer(answer, self.wandb.status)
        elif self.path.endswith("/file_stream"):
            if self.wandb.upload_status == 200:
                self.wandb.stream(self.path.split("/")[-2], json.loads(body))
            self._answer({"exitcode": None, "limits": {}}, self.wandb.upload_status)
        else:
            self._answer({}, 200)

    def do_PUT(self):
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.path.endswith(".table.json"):
            self.wandb.tables[self.path.split("/")[-1].split("_")[0]] = json.loads(body)
        self._answer({}, 200)

    def do_GET(self):
        self._answer({}, 200)

    def _answer(self, content, status):
        body = json.dumps(content if status == 200 else {"error": "no"}).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Nothing on the test's output."""


class SilentServer:
    """Accepts every connection and never answers."""

    def __enter__(self):
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        return self

    def __exit__(self, *_):
        self._socket.close()


def closed_port_url():
    """An address on the loopback at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return f"http://127.0.0.1:{found.getsockname()[1]}"
