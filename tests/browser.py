"""A page in headless Chromium at a given width: what it asks for, and whether it fits."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
import threading
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync", "--virtual-time-budget=8000", "--dump-dom",
)  # fmt: skip

# Chromium's own window is never narrower than 500 pixels; a frame is, and media queries see its width.
_FRAME = """<!DOCTYPE html><link rel="icon" href="data:,"><pre id="out"></pre>
<iframe id="frame" src="page.html" width="%d" height="900" style="border: 0"></iframe><script>
frame.onload = () => {
  const view = frame.contentWindow, root = view.document.documentElement;
  const texts = [...root.querySelectorAll("svg text")].map(text => {
    const scale = text.getScreenCTM();
    return parseFloat(view.getComputedStyle(text).fontSize) * Math.hypot(scale.a, scale.b);
  });
  out.textContent = JSON.stringify({
    requests: view.performance.getEntriesByType("resource").map(entry => entry.name),
    scroll_width: root.scrollWidth, client_width: root.clientWidth,
    charts: root.querySelectorAll("svg").length, smallest_text_px: Math.min(...texts, 99),
  });
};
</script>"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


def look(page: Path, width: int) -> dict[str, Any]:
    """Open the page in a frame of that width; returns what it requested, its widths, charts and smallest chart text."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(page, Path(folder) / "page.html")
        (Path(folder) / "frame.html").write_text(_FRAME % width)
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=folder))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            address = f"http://127.0.0.1:{server.server_port}/frame.html"
            words = [CHROMIUM, *_FLAGS, f"--user-data-dir={folder}/profile", "--window-size=1400,1000", address]
            done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
        finally:
            server.shutdown()
            server.server_close()
    found = re.search(r'<pre id="out">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert found is not None, done.stderr
    result: dict[str, Any] = json.loads(unescape(found[1]))
    return result
