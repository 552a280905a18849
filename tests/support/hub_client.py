"""A process that talks to the stand-in Hub: the real client reads its settings when it is imported.

`Client` starts it and gives it commands, one after the other: each of them alone would import PyTorch anew. Waits are
cut short and reported.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Done:
    """How a command ended, what it wrote, and the seconds that it would have waited."""

    code: int
    out: str
    err: str
    waited: list[float]

    @property
    def error(self) -> str:
        """The one line that tells the user; fails where there are several or a traceback."""
        (line,) = [line for line in self.err.splitlines() if line.startswith("error:")]
        assert "Traceback" not in self.err
        return line


class Client:
    """The process. `root` is the checkout, `home` where the Hub's client keeps its cache and token."""

    def __init__(self, root: Path, url: str, home: Path, **env: str) -> None:
        hub = {
            "HF_ENDPOINT": url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DOWNLOAD_TIMEOUT": "5",
            "HF_HUB_ETAG_TIMEOUT": "5",
            "CAPSZOO_HUB_TIMEOUT": "5",
        }
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.hub_client"],
            cwd=root,
            env={**kept, **hub, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _ask(self, **order: Any) -> Done:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return Done(**json.loads(self.process.stdout.readline()))

    def capszoo(self, *args: str | Path, token: str | None = "hf_right") -> Done:
        """Run a command of `capszoo`."""
        return self._ask(args=[str(arg) for arg in args], token=token)

    def python(self, code: str, token: str | None = None) -> Done:
        """Run Python code; an exception ends it with its text as the error line."""
        return self._ask(python=code, token=token)

    def close(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.kill()  # it has nothing to put away, and PyTorch takes its time
        self.process.wait()
        self.process.stdout.close()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    waited: list[float] = []
    sleep = time.sleep
    time.sleep = lambda seconds: (waited.append(seconds), sleep(min(seconds, 0.01)))[0]
    from capszoo.cli import app

    for line in sys.stdin:
        order = json.loads(line)
        os.environ.pop("HF_TOKEN", None)
        if order["token"]:
            os.environ["HF_TOKEN"] = order["token"]
        out, err, code = io.StringIO(), io.StringIO(), 0
        waited.clear()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                exec(order["python"], {}) if "python" in order else app(order["args"])
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 0
            except Exception as error:
                code = 1
                print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
                if "WeightsError" not in type(error).__name__:
                    traceback.print_exc()
        print(
            json.dumps({"code": code, "out": out.getvalue(), "err": err.getvalue(), "waited": waited}),
            file=answers,
            flush=True,
        )


if __name__ == "__main__":
    main()
