"""An HTTP endpoint on a model's exported file, to try it out: ``capszoo serve`` (extra ``serve``).

- ``POST /predict?topk=5`` with an image file as the body: classes, scores, probabilities as JSON.
- ``GET /health``: 200 once the model is ready.
- ``GET /metrics``: counts and times in Prometheus' text format.

One process, one image at a time; further requests wait in a bounded queue, and are refused with 503 if it is full.
Connections are limited in number, and closed if the headers of a request do not arrive in time.
"""

# No `from __future__ import annotations` here: FastAPI resolves annotations in the module, which lacks its classes.
import asyncio
import logging
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from typing import Any

from ..errors import CapszooError, first_line
from ..images import open_image
from ..scores import ImagePrediction, ScoredClass
from .model import MAX_FILE_MB, MAX_PIXELS, AppModel

#: Upper ends of the histogram's buckets, in seconds.
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


#: Seconds within which the headers of a request must arrive.
HEADER_SECONDS = 10.0

#: Connections at a time, at most; and open files that are left for everything else.
MOST_CONNECTIONS, OTHER_FILES = 512, 64

#: Seconds within which a fault of the same kind is written once.
FAULT_SECONDS = 10.0

#: Seconds within which the body of a request must arrive: a client that stops sending keeps a place in the queue.
BODY_SECONDS = 30.0


class Metrics:
    """Number of responses by status, and a histogram of prediction times."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.answers: Counter[int] = Counter()
        self.buckets = [0] * len(BUCKETS)
        self.seconds, self.count = 0.0, 0

    def add(self, status: int, seconds: float) -> None:
        """Record a response; only those with status 200 enter the histogram."""
        with self._lock:
            self.answers[status] += 1
            if status == 200:
                self.seconds += seconds
                self.count += 1
                for i, end in enumerate(BUCKETS):
                    self.buckets[i] += seconds <= end

    def text(self) -> str:
        """In Prometheus' text format."""
        with self._lock:
            lines = ["# TYPE capszoo_requests_total counter"]
            lines += [
                f'capszoo_requests_total{{status="{code}"}} {n}' for code, n in sorted(self.answers.items())
            ]
            lines.append("# TYPE capszoo_predict_seconds histogram")
            for end, n in zip(BUCKETS, self.buckets, strict=True):
                lines.append(f'capszoo_predict_seconds_bucket{{le="{end}"}} {n}')
            lines.append(f'capszoo_predict_seconds_bucket{{le="+Inf"}} {self.count}')
            lines.append(f"capszoo_predict_seconds_sum {self.seconds:.6f}")
            lines.append(f"capszoo_predict_seconds_count {self.count}")
        return "\n".join(lines) + "\n"


async def body_of(request: Any, limit: int = MAX_FILE_MB * 1_000_000) -> bytes:
    """The body of a request, read only up to a limit in bytes; raises FastAPI's ``HTTPException`` for a wrong one."""
    from fastapi import HTTPException

    if request.headers.get("content-type", "").startswith("multipart/"):
        raise HTTPException(
            415, "the body is a form: send the image file as it is (curl --data-binary @FILE)"
        )
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:18]) > limit:  # int() refuses numbers of thousands of digits
        raise HTTPException(413, f"the body is larger than {MAX_FILE_MB} MB: send a smaller image")
    parts = bytearray()
    async for chunk in request.stream():
        parts += chunk
        if len(parts) > limit:
            raise HTTPException(413, f"the body is larger than {MAX_FILE_MB} MB: send a smaller image")
    if not parts:
        raise HTTPException(400, "the body is empty: send an image file as it is")
    return bytes(parts)


def create_app(model: AppModel, queue: int = 64) -> Any:
    """The endpoint as an ASGI application.

    Args:
        model: the exported model.
        queue: maximum number of active and waiting requests; further ones get 503.
    """
    from fastapi import FastAPI, HTTPException, Query, Request, Response
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import ClientDisconnect

    app = FastAPI(title="capszoo", docs_url=None, redoc_url=None, openapi_url=None)
    metrics, turn = Metrics(), threading.Lock()
    waiting = 0

    def classify(data: bytes, topk: int) -> dict[str, Any]:
        with turn:  # decoding too: a small file may decode to many pixels
            image = open_image(data, name="the body", max_pixels=MAX_PIXELS)
            answer = model.answer(image, explained=False, swap=False)
        top = (
            ScoredClass(i, answer.labels[i], float(answer.scores[i]), float(answer.probabilities[i]))
            for i in answer.scores.argsort()[::-1][:topk].tolist()
        )
        return ImagePrediction(model.name, tuple(top), notes=answer.notes).to_dict(key="model")

    @app.post("/predict")
    async def predict(request: Request, response: Response, topk: int = Query(5, ge=1, le=1000)) -> Any:
        nonlocal waiting
        start, status = time.perf_counter(), 500
        try:
            if waiting >= queue:
                status = 503
                raise HTTPException(503, "too many requests wait: try again", {"Retry-After": "1"})
            waiting += 1
            try:
                body = await asyncio.wait_for(body_of(request), BODY_SECONDS)
                answers = await run_in_threadpool(classify, body, topk)
            except asyncio.TimeoutError:
                raise HTTPException(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
            finally:
                waiting -= 1
            status = 200
            return answers
        except ClientDisconnect:  # in the middle of its body: there is no one to answer
            status = 499
            return Response(status_code=status)
        except CapszooError as error:
            status = 422
            raise HTTPException(422, " ".join(str(error).split())[:500]) from None
        except HTTPException as error:
            status = error.status_code
            raise
        finally:
            metrics.add(status, time.perf_counter() - start)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ready", "model": model.name}

    @app.get("/metrics")
    async def show_metrics() -> Any:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    return app


def most_connections() -> int:
    """Connections at a time: as many as this process may open files, less some for other files."""
    try:
        import resource

        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except (ImportError, OSError):  # Windows
        return MOST_CONNECTIONS
    return MOST_CONNECTIONS if files < 0 else max(1, min(MOST_CONNECTIONS, files - OTHER_FILES))


def limited_protocol(most: int) -> Any:
    """uvicorn's HTTP protocol, which closes connections beyond ``most``, and those whose headers do not arrive."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Limited(H11Protocol):
        deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            if len(self.connections) >= most:
                self.transport = transport
                transport.abort()
                return
            super().connection_made(transport)
            self._expect_headers()

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:  # a request has begun
                self._stop()
            elif self.deadline is None:
                self._expect_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            if self in self.connections:  # others were never taken
                super().connection_lost(exc)

        def _expect_headers(self) -> None:
            self.deadline = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

        def _stop(self) -> None:
            if self.deadline is not None:
                self.deadline.cancel()
                self.deadline = None

    return Limited


def log_config() -> dict[str, Any]:
    """Settings of ``logging``: what the server and its event loop have to say goes to stderr, in one line each."""
    loggers = ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio")
    stderr = {"class": "logging.StreamHandler", "formatter": "line", "filters": ["one_line"]}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "filters": {"one_line": {"()": OneLine}},
        "formatters": {"line": {"format": "%(levelname)s: %(message)s"}},
        "handlers": {"stderr": stderr},
        "loggers": {
            name: {"handlers": ["stderr"], "level": "WARNING", "propagate": False} for name in loggers
        },
    }


class OneLine(logging.Filter):
    """Faults in one line without a traceback, each kind once in ``FAULT_SECONDS``."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is written; it becomes its line."""
        line = (record.getMessage().strip().splitlines() or [record.levelname])[0]
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            line = f"{line} ({type(error).__name__}: {first_line(error)})"
        record.msg, record.args, record.exc_info, record.exc_text = line, (), None, None
        now = time.monotonic()
        if now - self._last.get(line, -FAULT_SECONDS) < FAULT_SECONDS:
            return False
        if len(self._last) > 100:
            self._last.clear()
        self._last[line] = now
        return True


def serve(name: str, host: str = "127.0.0.1", port: int = 8000, queue: int = 64) -> None:
    """Serve a model until the process is stopped.

    Args:
        name: a name for ``capszoo predict``.
        host, port: address to listen on.
        queue: maximum number of active and waiting requests.

    Raises:
        CapszooError: the model cannot be used, or the address is taken.
    """
    import uvicorn

    try:  # before the export, which takes its time
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise CapszooError(
            f"{host}:{port} cannot be served ({error.strerror or error})", "choose another --port or --host"
        ) from None
    with tempfile.TemporaryDirectory(prefix="capszoo-serve-") as folder:
        model = AppModel(name, folder)
    shown = f"[{host}]" if ":" in host else host
    print(
        f"{model.name} answers at http://{shown}:{port}/predict; Ctrl-C ends it", file=sys.stderr, flush=True
    )
    uvicorn.run(
        create_app(model, queue),
        host=host,
        port=port,
        workers=1,
        http=limited_protocol(most_connections()),
        ws="none",
        log_config=log_config(),
        log_level="warning",
        timeout_graceful_shutdown=5,  # a client that stops sending must not delay Ctrl-C
    )
