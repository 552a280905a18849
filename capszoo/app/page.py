"""The Gradio page: a drawing on the left, one or two models beside it."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._catalogue import check_model_argument, checkpoints
from ..errors import CapszooError, require
from .model import MAX_FILE_MB, MAX_ITERATIONS, Answer, AppModel, read_drawing, read_upload
from .pictures import SIDE, couplings_picture, enlarged, overlay_picture, scale_html

__all__ = ["DEFAULT_MODEL", "MAX_DIMS", "Models", "build", "run"]

#: The model that the page begins with: small, with a decoder.
DEFAULT_MODEL = "capsnet_dynamic.mnist"

#: Sliders for the dimensions of a capsule.
MAX_DIMS = 16

#: What a dimension may be changed by, at most. Fig. 4 of Sabour et al. (2017) takes 0.25.
MOST_OFFSET = 0.5

#: Seconds after which a request's files are deleted.
KEEP_SECONDS = 120

NO_MODEL = "none"

CANVAS = f"""<div>Draw a digit</div>
<canvas width="{SIDE}" height="{SIDE}" style="touch-action:none;cursor:crosshair;border:1px solid #888"></canvas>
<div><button type="button">Clear</button></div>"""

#: Sends what is drawn to the server.
CONNECT = """
capszooCanvas(element.querySelector("canvas"), element.querySelector("button"),
  (canvas) => trigger("input", { drawing: canvas === null ? "" : canvas.toDataURL("image/png") }));
"""


class Models:
    """The models of the page, each loaded and exported when it is first chosen.

    Args:
        folder: where exports are written for a moment.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder, self._lock = Path(folder), threading.Lock()
        self._models: dict[str, AppModel] = {}

    def get(self, name: str) -> AppModel:
        """The model of a name; `CapszooError` where it cannot be used."""
        with self._lock:
            if name not in self._models:
                self._models[name] = AppModel(name, self._folder)
            return self._models[name]


@dataclass
class _Column:
    """The parts of the page that show one model."""

    model: Any
    body: Any
    label: Any
    status: Any
    seen: Any
    couplings: Any
    overlay: Any
    reconstruction: Any
    iterations: Any
    settled: Any
    sliders: list[Any]
    answer: Any

    @property
    def shown(self) -> list[Any]:
        """What an answer fills."""
        pictures = [self.seen, self.couplings, self.overlay, self.reconstruction, self.settled]
        return [self.body, self.answer, self.label, self.status, *pictures, self.iterations, *self.sliders]


def _show(gr: Any, models: Models, name: str, image: Any, drawn: bool) -> list[Any]:
    """The values of `_Column.shown`."""
    none, body = gr.update(value=None), gr.update(visible=name != NO_MODEL)

    def nothing(said: str) -> list[Any]:
        hidden = [gr.update(visible=False, value=0) for _ in range(MAX_DIMS)]
        return [body, None, none, said, *[none] * 5, gr.update(visible=False), *hidden]

    if name == NO_MODEL or image is None:
        said = "" if name == NO_MODEL else "Draw a digit, or drop an image."
        return nothing(said)
    try:
        model = models.get(name)
        answer = model.answer(image, drawn)
    except CapszooError as error:
        return nothing(str(error))
    sliders = [gr.update(visible=i < model.dims, value=0) for i in range(MAX_DIMS)]
    said = f"**{answer.label}** in {answer.milliseconds:.0f} ms"
    said += "".join(f"; {note}" for note in answer.notes)
    pictures = [none, none] if answer.explanation is None else _pictures(answer)
    if answer.explanation is None:
        said += "; this network routes nothing, so it has no couplings"
    decoded = enlarged(model.reconstruct(answer)) if model.dims else None
    steps = gr.update(visible=bool(model.iterations), value=model.iterations or 1)
    seen = enlarged(answer.view)
    settled = pictures[1] if model.iterations else none
    return [body, answer, answer.top(), said, seen, *pictures, decoded, settled, steps, *sliders]


def _pictures(answer: Answer) -> list[Any]:
    assert answer.explanation is not None
    found = answer.explanation
    return [couplings_picture(found), overlay_picture(found, answer.view)]


def _exported(columns: Sequence[tuple[AppModel, Answer, Sequence[float], int]], folder: Path) -> str:
    """A ZIP file of what is seen: for each model its pictures, scores and settings."""
    made = Path(tempfile.mkdtemp(dir=folder)) / "capszoo.zip"
    with zipfile.ZipFile(made, "w") as archive:

        def add(name: str, picture: Any) -> None:
            with archive.open(name, "w") as file:
                picture.save(file, "png")

        for model, answer, offsets, iterations in columns:
            stem = Path(model.name).name
            add(f"{stem}/input.png", answer.view)
            found: dict[str, Any] = {"model": model.name, **answer.to_dict()}
            settled = model.settle(answer, iterations) if model.iterations else answer.explanation
            if settled is not None:
                add(f"{stem}/couplings.png", couplings_picture(settled))
                add(f"{stem}/overlay.png", overlay_picture(settled, answer.view))
                found |= {"routing_iterations": iterations}
                found["couplings_relative_to_even"] = settled.relative.nan_to_num(0).tolist()
            if model.dims:
                add(f"{stem}/reconstruction.png", model.reconstruct(answer, offsets))
                found["capsule_offsets"] = list(offsets)[: model.dims]
            archive.writestr(f"{stem}/answer.json", json.dumps(found, indent=1))
    return str(made)


def _column(gr: Any, number: int, names: list[str], chosen: str) -> _Column:
    def picture(label: str, id: str) -> Any:
        return gr.Image(
            label=label, elem_id=f"{id}-{number}", height=SIDE, interactive=False, buttons=[], type="pil"
        )

    with gr.Column(min_width=300):
        model = gr.Dropdown(names, value=chosen, label=f"Model {number}", elem_id=f"model-{number}")
        with gr.Column(visible=chosen != NO_MODEL, min_width=280) as body:
            status = gr.Markdown("Draw a digit, or drop an image.", elem_id=f"status-{number}")
            label = gr.Label(num_top_classes=5, label="Classes", elem_id=f"classes-{number}")
            with gr.Row():
                overlay, couplings = (
                    picture("Couplings over the image", "overlay"),
                    picture("Couplings", "couplings"),
                )
            gr.HTML(scale_html())
            with gr.Row():
                seen, reconstruction = picture("Input", "seen"), picture("Reconstruction", "reconstruction")
            with gr.Accordion("Dimensions of the winning capsule", open=True), gr.Row():
                sliders = [
                    gr.Slider(
                        -MOST_OFFSET,
                        MOST_OFFSET,
                        value=0,
                        step=0.01,
                        label=f"dimension {i}",
                        visible=False,
                        min_width=130,
                        elem_id=f"dim-{number}-{i}",
                    )
                    for i in range(MAX_DIMS)
                ]
            with gr.Accordion("Couplings by routing iteration", open=True):
                iterations = gr.Slider(
                    1,
                    MAX_ITERATIONS,
                    step=1,
                    label="routing iterations",
                    visible=False,
                    elem_id=f"iterations-{number}",
                )
                settled = picture("Couplings after each iteration", "settled")
            answer = gr.State(None, time_to_live=3600)
    return _Column(
        model,
        body,
        label,
        status,
        seen,
        couplings,
        overlay,
        reconstruction,
        iterations,
        settled,
        sliders,
        answer,
    )


def build(models: Models, names: Sequence[str], first: str, folder: Path) -> Any:
    """The page as Gradio blocks.

    Args:
        models: behind it.
        names: to choose from.
        first: of the first column.
        folder: for the files of a request.
    """
    import gradio as gr

    with gr.Blocks(
        title="capszoo", analytics_enabled=False, delete_cache=(KEEP_SECONDS, KEEP_SECONDS)
    ) as page:
        gr.Markdown(
            "# Capsule networks\nDraw a digit or drop an image. Colours show which positions were routed to the "
            "capsule of the predicted class, relative to an even share."
        )
        with gr.Row():
            with gr.Column(min_width=300, scale=0):
                sketch = gr.HTML(
                    html_template=CANVAS,
                    js_on_load=Path(__file__).with_name("draw.js").read_text(encoding="utf-8") + CONNECT,
                    elem_id="sketch",
                )
                upload = gr.File(label="Or an image file", type="filepath", elem_id="upload", height=120)
                message = gr.Markdown("", elem_id="message")
                export = gr.Button("Export what is seen", elem_id="export")
                exported = gr.File(label="Exported", visible=False, interactive=False, elem_id="exported")
            left = _column(gr, 1, list(names), first)
            right = _column(gr, 2, [NO_MODEL, *names], NO_MODEL)
        picture = gr.State((None, False), time_to_live=3600)
        _wire(gr, models, folder, (left, right), (sketch, upload, message, export, exported, picture))
    return page


def _wire(gr: Any, models: Models, folder: Path, columns: Sequence[_Column], shared: tuple[Any, ...]) -> None:
    """Connect what is done on the page with what is shown."""
    sketch, upload, message, export, exported, picture = shared

    def show_all(image: Any, drawn: bool, said: str, names: Sequence[str]) -> list[Any]:
        shown = [value for name in names for value in _show(gr, models, name, image, drawn)]
        return [(image, drawn), said, *shown]

    def drew(event: Any, *names: str) -> list[Any]:
        try:
            return show_all(read_drawing(event.drawing), True, "", names)
        except CapszooError as error:
            return show_all(None, False, f"**{error}**", names)

    def dropped(path: str | None, *names: str) -> list[Any]:
        if path is None:
            return show_all(None, False, "", names)
        try:
            return show_all(read_upload(path), False, "", names)
        except CapszooError as error:
            return show_all(None, False, f"**{error}**", names)
        finally:
            Path(path).unlink(missing_ok=True)

    drew.__annotations__["event"] = gr.EventData  # gradio looks at the class, which is not known above
    names = [column.model for column in columns]
    outputs = [picture, message, *(part for column in columns for part in column.shown)]
    quick: dict[str, Any] = {"show_progress": "hidden", "queue": False}  # the queue costs 0.3 s
    sketch.input(drew, names, outputs, trigger_mode="multiple", **quick)
    upload.change(dropped, [upload, *names], outputs, trigger_mode="multiple", **quick)
    for column in columns:
        column.model.change(_shower(gr, models), [column.model, picture], column.shown)
        for slider in column.sliders:
            slider.input(
                _reconstructor(models),
                [column.model, column.answer, *column.sliders],
                column.reconstruction,
                trigger_mode="always_last",
                **quick,
            )
        column.iterations.input(
            _settler(models),
            [column.model, column.answer, column.iterations],
            column.settled,
            trigger_mode="always_last",
            **quick,
        )
    inputs = [part for c in columns for part in (c.model, c.answer, c.iterations, *c.sliders)]

    def export_seen(*values: Any) -> tuple[Any, str]:
        width = len(values) // len(columns)
        seen = []
        for start in range(0, len(values), width):
            name, answer, iterations, *offsets = values[start : start + width]
            if answer is not None and name != NO_MODEL:
                seen.append((models.get(name), answer, offsets, int(iterations or 1)))
        if not seen:
            return gr.update(visible=False), "**Nothing is shown yet: draw a digit, or drop an image.**"
        return gr.update(visible=True, value=_exported(seen, folder)), ""

    export.click(export_seen, inputs, [exported, message])


def _shower(gr: Any, models: Models) -> Any:
    def show(name: str, picture: tuple[Any, bool]) -> list[Any]:
        return _show(gr, models, name, *picture)

    return show


def _reconstructor(models: Models) -> Any:
    def reconstruct(name: str, answer: Answer | None, *offsets: float) -> Any:
        if answer is None or answer.poses is None:
            return None
        return enlarged(models.get(name).reconstruct(answer, offsets))

    return reconstruct


def _settler(models: Models) -> Any:
    def settle(name: str, answer: Answer | None, iterations: int) -> Any:
        found = None if answer is None else models.get(name).settle(answer, int(iterations))
        return None if answer is None or found is None else overlay_picture(found, answer.view)

    return settle


def run(
    names: Sequence[str] = (), host: str = "127.0.0.1", port: int | None = None, browser: bool = False
) -> None:
    """Serve the page until it is stopped.

    Args:
        names: models to choose from, the first one first; none takes `DEFAULT_MODEL` and every checkpoint.
        host: address to listen on. ``127.0.0.1`` is this machine alone.
        port: port to listen on; None takes the first free one from 7860 on.
        browser: open the page in a browser.

    Raises:
        CapszooError: an extra is missing, a model cannot be used, or the port is taken.
    """
    require("the app", ["gradio", "onnxruntime", "matplotlib"], "app")
    for name in names:
        check_model_argument(name)
    offered = list(names) or [DEFAULT_MODEL, *(n for n in sorted(checkpoints()) if n != DEFAULT_MODEL)]
    if threading.current_thread() is threading.main_thread():
        # a page that is stopped by a signal removes its files, too
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="capszoo-app-") as folder:
        # read when gradio is imported, and with every upload
        os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
        os.environ["GRADIO_TEMP_DIR"] = folder
        import gradio as gr

        models = Models(folder)
        models.get(offered[0])  # exported before the page opens
        page = build(models, offered, offered[0], Path(folder))
        try:
            page.launch(
                server_name=host,
                server_port=port,
                inbrowser=browser,
                share=False,
                max_file_size=f"{MAX_FILE_MB}mb",
                ssr_mode=False,
                footer_links=[],
                theme=gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"]),
            )
        except OSError as error:
            reason = str(error).splitlines()[0]
            raise CapszooError(
                f"the page cannot be served ({reason})", "choose another --port or --host"
            ) from None
        finally:
            page.close()
