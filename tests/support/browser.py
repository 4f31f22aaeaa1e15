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

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed here")

_FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-component-update
    --disable-background-networking --disable-sync --virtual-time-budget=8000 --dump-dom"""

# A frame in which the body of a function runs: `page` is its document, `view` its window, `wait()` lets it draw.
# Chromium's own window is never narrower than 500 pixels; a frame is, and media queries see its width. Virtual time
# leaps from timer to timer, and hardly a frame is drawn meanwhile: timers stand in for frames.
_LOOK = """
  while (page.querySelector(".vega:not([data-rows])")) await wait();
  const root = page.documentElement;
  // Vega hides a label that another one leaves no room.
  const cut = [...root.querySelectorAll('svg text:not([opacity="0"])')].filter(text => {
    const box = text.getBoundingClientRect(), chart = text.closest("svg").getBoundingClientRect();
    const is_outside = box.left < chart.left - 1 || box.right > chart.right + 1 || box.bottom > chart.bottom + 1;
    return is_outside || text.textContent.endsWith("\\u2026");
  });
  return {
    requests: view.performance.getEntriesByType("resource").map(entry => entry.name),
    scroll_width: root.scrollWidth, client_width: root.clientWidth,
    cut_texts: cut.map(text => text.textContent),
    charts: root.querySelectorAll("svg").length,
  };
"""
_OPERATED = """<!DOCTYPE html><link rel="icon" href="data:,"><pre id="out"></pre>
<iframe id="frame" src="page.html" width="%d" height="900" style="border: 0"></iframe><script>
frame.onload = async () => {
  const view = frame.contentWindow, page = frame.contentDocument, errors = [];
  const wait = () => new Promise(done => setTimeout(done, 40));
  view.addEventListener("error", event => errors.push(String(event.message)));
  page.addEventListener("securitypolicyviolation", event => errors.push(event.violatedDirective));
  view.requestAnimationFrame = draw => view.setTimeout(draw, 10);
  const value = await (async () => { %s })();
  out.textContent = JSON.stringify({value, errors});
};
</script>"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        pass


def look(page, width):
    """Open the page in a frame of that width; returns what it requested, its widths, charts, and which of their texts
    are cut off."""
    return operate(page, width, _LOOK)


def operate(page, width, script):
    """Open the page and run the body of a function in it; returns what that returns, after a check for errors."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(page, Path(folder) / "page.html")
        (Path(folder) / "frame.html").write_text(_OPERATED % (width, script))
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=folder))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            address = f"http://127.0.0.1:{server.server_port}/frame.html"
            words = [CHROMIUM, *_FLAGS.split(), f"--user-data-dir={folder}/profile", "--window-size=1400,1000", address]
            done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
        finally:
            server.shutdown()
            server.server_close()
    found = re.search(r'<pre id="out">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert found is not None, done.stderr
    result = json.loads(unescape(found[1]))
    assert result["errors"] == []
    return result["value"]
