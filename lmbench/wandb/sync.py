"""Upload one offline run with wandb's own `wandb sync`: `python -m lmbench.wandb.sync FILE`, in a process of its own.

First the server is asked for anything at all: wandb itself goes on trying a dead one for a long time, in silence.
"""

from __future__ import annotations

import os
import runpy
import sys
import urllib.error
import urllib.request

UNREACHABLE = 5

_DEFAULT_URL = "https://api.wandb.ai"
# For one answer to one small question.
_ANSWER_TIMEOUT_S = 10.0


def main(argv: list[str]) -> int:
    """Upload; exits with UNREACHABLE, and the reason as the last line, where nobody answers at the server's address."""
    url = _server()
    reason = unreachable(url)
    if reason is not None:
        print(f"{url}: {reason}", flush=True)
        return UNREACHABLE
    sys.argv = ["wandb", "sync", "--include-synced", argv[0]]
    runpy.run_module("wandb", run_name="__main__", alter_sys=True)
    return 0


def _server() -> str:
    """The server's address as wandb finds it: also in its settings files."""
    try:
        from wandb.sdk import wandb_setup

        return str(wandb_setup.singleton().settings.base_url)
    except (ImportError, AttributeError):
        return os.environ.get("WANDB_BASE_URL", _DEFAULT_URL)


def unreachable(url: str) -> str | None:
    """Why nobody answers at the address; None for any answer, also an error, and where only wandb can tell."""
    try:
        with urllib.request.urlopen(url, timeout=_ANSWER_TIMEOUT_S):
            return None
    except urllib.error.HTTPError:
        return None
    except TimeoutError:
        return f"no answer within {_ANSWER_TIMEOUT_S:.0f} s"
    except urllib.error.URLError as exc:
        reason = exc.reason
        if isinstance(reason, TimeoutError):
            return f"no connection within {_ANSWER_TIMEOUT_S:.0f} s"
        # Certificates are wandb's own matter: it may trust others than this Python does.
        return " ".join(str(getattr(reason, "strerror", None) or reason).split()) if _is_network(reason) else None
    except (OSError, ValueError):
        return None


def _is_network(reason: object) -> bool:
    from socket import gaierror

    return isinstance(reason, gaierror | ConnectionError) or getattr(reason, "errno", None) in _NO_ROUTE


_NO_ROUTE = (101, 113)  # ENETUNREACH, EHOSTUNREACH


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
