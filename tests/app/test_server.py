"""``capszoo serve``: answers, refusals, metrics, and a bounded load test."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import logging
import logging.config
import re
import socket
import statistics
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from PIL import Image

import capszoo
from capszoo.app.model import MAX_FILE_MB
from capszoo.app.server import (
    BUCKETS,
    OTHER_FILES,
    Metrics,
    create_app,
    limited_protocol,
    log_config,
    most_connections,
    serve,
)
from capszoo.errors import CapszooError
from tests.support.browser import free_port, served
from tests.support.errors import refuses

MODEL = "resnet20_routingcaps.mnist"
DIGITS = Path(capszoo.__file__).parent / "assets"

needs_fastapi = pytest.mark.skipif(
    importlib.util.find_spec("fastapi") is None,
    reason="needs fastapi: make test-site runs this in the site's environment",
)


def test_metrics_count_and_add_up() -> None:
    metrics = Metrics()
    for status, seconds in ((200, 0.003), (200, 0.2), (422, 9.0)):
        metrics.add(status, seconds)
    text = metrics.text()
    assert 'capszoo_requests_total{status="200"} 2' in text
    assert 'capszoo_requests_total{status="422"} 1' in text
    assert f'capszoo_predict_seconds_bucket{{le="{BUCKETS[0]}"}} 1' in text
    assert 'capszoo_predict_seconds_bucket{le="0.25"} 2' in text
    assert "capszoo_predict_seconds_sum 0.203000" in text
    assert 'capszoo_predict_seconds_bucket{le="+Inf"} 2' in text and "capszoo_predict_seconds_count 2" in text


def _drive(
    headers: list[tuple[bytes, bytes]], events: list[dict], queue: int = 64, then: list[dict] | None = None
) -> tuple[list[dict], str]:
    """Send ASGI events to ``/predict`` of a model that is never called; what was answered, and the metrics.

    ``then``: the events of a second request.
    """
    served_app = create_app(cast(Any, None), queue)
    about = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "query_string": b""}

    async def call(
        method: str, path: str, headers: list[tuple[bytes, bytes]], events: list[dict]
    ) -> list[dict]:
        waiting, sent = iter(events), []

        async def receive() -> dict:
            for event in waiting:
                return event
            await asyncio.Event().wait()  # nothing more is sent
            raise AssertionError

        async def send(message: dict) -> None:
            sent.append(message)

        scope = {**about, "method": method, "path": path, "headers": headers}
        await served_app(scope, receive, send)
        return sent

    sent = asyncio.run(call("POST", "/predict", headers, events))
    if then is not None:
        asyncio.run(call("POST", "/predict", [], then))
    text = asyncio.run(call("GET", "/metrics", [], [{"type": "http.request", "body": b""}]))
    return sent, b"".join(message.get("body", b"") for message in text).decode()


@needs_fastapi
def test_a_client_that_stops_sending_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capszoo.app.server.BODY_SECONDS", 0.05)
    sent, metrics = _drive([], [_body(b"half an image", True)], queue=1, then=[_body(b"no image")])
    assert sent[0]["status"] == 408 and b"within 0.05 s" in sent[1]["body"] and 'status="408"} 1' in metrics
    assert 'status="422"} 1' in metrics and 'status="503"' not in metrics, "its place is free again"


def _body(data: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": data, "more_body": more}


@needs_fastapi
def test_what_is_no_image_is_refused_and_counted() -> None:
    left = {"type": "http.disconnect"}
    _, metrics = _drive([], [_body(b"half an image", more=True), left])
    assert 'status="499"} 1' in metrics and 'status="500"' not in metrics  # which is no failure of the server
    without_length = [_body(bytes(1_000_000), more=True)] * (MAX_FILE_MB + 2)
    form = [(b"content-type", b"multipart/form-data; boundary=B")]
    Image.new("1", (5000, 4000)).save(large := io.BytesIO(), "PNG")
    for headers, events, status, said in (
        (form, [], 415, b"--data-binary"),
        ([], without_length, 413, b"larger than"),
        ([], [_body(large.getvalue())], 422, b"5000x4000 are more than 16,000,000 pixels"),
    ):
        sent, metrics = _drive(headers, events)
        assert sent[0]["status"] == status and said in sent[1]["body"]
        assert f'status="{status}"}} 1' in metrics


@needs_fastapi
def test_a_full_queue_is_refused() -> None:
    sent, metrics = _drive([], [_body(b"x")], queue=0)
    assert sent[0]["status"] == 503 and (b"retry-after", b"1") in sent[0]["headers"]
    assert 'status="503"} 1' in metrics


@needs_fastapi
def test_a_taken_port_is_one_line_before_the_export(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capszoo.app.server.AppModel", lambda *_: pytest.fail("exported first"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with refuses(CapszooError, names=[f"127.0.0.1:{port}", "--port"]):
            serve(MODEL, port=port)


@needs_fastapi
def test_the_address_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("capszoo.app.server.AppModel", lambda name, _: SimpleNamespace(name=name))
    monkeypatch.setattr("capszoo.app.server.create_app", lambda *_: None)
    monkeypatch.setattr("uvicorn.run", lambda *_, **__: None)
    serve(MODEL, port=(port := free_port()))
    assert capsys.readouterr().err == f"{MODEL} answers at http://127.0.0.1:{port}/predict; Ctrl-C ends it\n"


@contextmanager
def _uvicorn(app: Any, most: int) -> Iterator[int]:
    """The port of a server in a thread, which takes ``most`` connections."""
    uvicorn = pytest.importorskip("uvicorn", reason="needs uvicorn: make test-site runs this")
    settings = {"port": (port := free_port()), "log_config": None, "lifespan": "off"}
    server = uvicorn.Server(uvicorn.Config(app, http=limited_protocol(most), **settings))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield port
    server.should_exit = True
    thread.join(5)
    assert not thread.is_alive()


async def _ok(scope: dict, receive: Any, send: Any) -> None:
    await asyncio.sleep(0.3)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


def _closed(client: socket.socket) -> bool:
    """Whether the server closes a connection within the client's own time limit."""
    try:
        while client.recv(1000):
            pass
    except ConnectionResetError:
        pass
    return True


def test_headers_that_do_not_arrive_close_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capszoo.app.server.HEADER_SECONDS", 0.1)
    with _uvicorn(_ok, 8) as port:
        for half in (b"", b"GET / HTTP/1.1\r\nhost:"):
            with socket.create_connection(("127.0.0.1", port), 3) as client:
                client.sendall(half)
                assert _closed(client)
        with socket.create_connection(("127.0.0.1", port), 3) as client:
            client.sendall(REQUEST)
            answer = b""
            while not answer.endswith(b"ok"):  # which may take longer than the headers
                answer += client.recv(1000)
            client.sendall(REQUEST[:20])
            assert _closed(client)


def test_connections_beyond_the_limit_are_closed_and_a_place_is_free_again() -> None:
    with _uvicorn(_ok, 2) as port:
        held = [socket.create_connection(("127.0.0.1", port), 3) for _ in range(2)]
        time.sleep(0.2)
        with socket.create_connection(("127.0.0.1", port), 3) as refused:
            assert _closed(refused)
        for client in held:
            client.close()
        time.sleep(0.2)
        with socket.create_connection(("127.0.0.1", port), 3) as client:
            client.sendall(REQUEST)
            assert client.recv(1000).startswith(b"HTTP/1.1 200")


def test_a_fault_is_one_line_and_so_is_a_flood_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    logging.config.dictConfig(config := log_config())
    logger = logging.getLogger("asyncio")
    try:
        for _ in range(1000):
            try:
                raise OSError(24, "Too many open files")
            except OSError:
                logger.exception("socket.accept() out of system resource\nsocket: <...>")
        logger.error("another fault")
    finally:
        for name in config["loggers"]:
            logging.getLogger(name).handlers.clear()
            logging.getLogger(name).propagate = True
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "Too many open files" in lines[0] and "another fault" in lines[1]


def test_fewer_connections_than_files_may_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))
    assert most_connections() == 100 - OTHER_FILES


@pytest.fixture(scope="module")
def address(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "capszoo", "serve", MODEL, "--port", str(port), "--queue", "16"]
    log = tmp_path_factory.mktemp("serve") / "log"
    with served(command, port, root, {"PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1"}, log) as url:
        yield url


def _post(address: str, data: bytes, query: str = "") -> tuple[int, dict]:
    request = urllib.request.Request(f"{address}predict{query}", data=data, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.slow
@needs_fastapi
def test_digits_are_answered_as_predict_does(address: str) -> None:
    model = capszoo.load(MODEL)
    for k in range(10):
        status, found = _post(address, (DIGITS / f"digit_{k}.png").read_bytes(), "?topk=3")
        expected = model.predict(DIGITS / f"digit_{k}.png", topk=3)
        assert status == 200 and [one["label"] for one in found["predictions"]] == [
            one.label for one in expected.top
        ]
        assert found["predictions"][0]["score"] == pytest.approx(expected.top[0].score, abs=1e-3)


@pytest.mark.slow
@needs_fastapi
def test_bad_bodies_are_refused(address: str) -> None:
    for data, query, expected in (
        (b"", "", 400),
        (b"no image", "", 422),
        ((DIGITS / "digit_1.png").read_bytes()[:60], "", 422),
        ((DIGITS / "digit_1.png").read_bytes(), "?topk=0", 422),
    ):
        status, said = _post(address, data, query)
        assert status == expected and said["detail"], (status, said)
    # Refused by the stated length, before the body is read: sending it would break the connection at any moment.
    host, port = address.removeprefix("http://").strip("/").split(":")
    for length, expected in (("10000001", (b"413",)), ("9" * 5000, (b"400", b"413"))):
        with socket.create_connection((host, int(port)), timeout=10) as raw:
            raw.sendall(f"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n".encode())
            assert raw.recv(100).split()[1] in expected, f"a length of {len(length)} digits"
    with urllib.request.urlopen(f"{address}health", timeout=10) as answer:
        assert json.load(answer) == {"status": "ready", "model": MODEL}


@pytest.mark.slow
@needs_fastapi
def test_a_bounded_load_is_answered(address: str) -> None:
    """400 requests of 8 clients: each is answered, or refused with 503, and the metrics count them."""
    body = (DIGITS / "digit_7.png").read_bytes()
    before = _counted(address)

    def one(_: int) -> tuple[int, float]:
        start = time.perf_counter()
        return _post(address, body)[0], time.perf_counter() - start

    with ThreadPoolExecutor(8) as clients:
        found = list(clients.map(one, range(400)))
    statuses = [status for status, _ in found]
    times = sorted(seconds for status, seconds in found if status == 200)
    cuts = statistics.quantiles(times, n=100)
    print(f"{len(times)} of 400 answered; p50 {1000 * cuts[49]:.0f} ms, p99 {1000 * cuts[98]:.0f} ms")
    assert set(statuses) <= {200, 503} and len(times) == 400, "a queue of 16 holds 8 clients"
    assert _counted(address) - before == 400


def _counted(address: str) -> int:
    with urllib.request.urlopen(f"{address}metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = re.search(r'capszoo_requests_total\{status="200"\} (\d+)', text)
    return int(found[1]) if found else 0
