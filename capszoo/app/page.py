"""The Gradio page: a drawing on the left, one or two models beside it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import threading
import time
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._pretrained.catalogue import check_model_argument, checkpoints
from ..errors import CapszooError, first_line
from .model import MAX_FILE_MB, MAX_ITERATIONS, Answer, AppModel, read_drawing, read_upload
from .pictures import (
    PICTURE,
    PICTURE_STYLE,
    SIDE,
    couplings_picture,
    data_url,
    overlay_picture,
    scale_html,
)

#: The model at the start: small, with a decoder.
DEFAULT_MODEL = "capsnet_dynamic.mnist"

#: Sliders for the dimensions of a capsule.
MAX_DIMS = 16

#: Largest change of a dimension. Fig. 4 of Sabour et al. (2017) uses 0.25.
MOST_OFFSET = 0.5

#: Seconds after which a request's files are deleted.
KEEP_SECONDS = 120

NO_MODEL = "none"

NOTHING = "Draw a digit, or drop an image."

#: Options of an event that is answered immediately, without Gradio's queue, which costs 0.3 s.
QUICK: dict[str, Any] = {"show_progress": "hidden", "queue": False}

CANVAS = f"""<div>Draw a digit</div>
<canvas width="{SIDE}" height="{SIDE}" style="touch-action:none;cursor:crosshair;border:1px solid #888"></canvas>
<div style="margin-top:6px"><button type="button">Clear</button></div>"""

#: Sends the drawing as the component's value, not as the event's data. An event that Gradio defers (``always_last``)
#: has the data of the event before it, but the components' values of its own time.
CONNECT = """
capszooCanvas(element.querySelector("canvas"), element.querySelector("button"), (canvas) => {
  props.value = canvas === null ? "" : canvas.toDataURL("image/png");
  trigger("input");
});
"""


class Models:
    """The models of the page, each loaded and exported when it is first selected.

    Args:
        folder: folder for temporary exports.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder, self._lock = Path(folder), threading.Lock()
        self._models: dict[str, AppModel] = {}
        self._failed: dict[str, str] = {}
        self._asked: set[str] = set()

    def get(self, name: str, wait: bool = True) -> AppModel:
        """The model of a name.

        Args:
            name: of a model; it is loaded and exported if it has not been, one model at a time.
            wait: load the model, also one that could not be loaded before; without, it must have been loaded.

        Raises:
            CapszooError: the model cannot be used, or, without ``wait``, has not been loaded yet.
        """
        if name in self._models:  # without the lock: a model that is being loaded must not delay the others
            return self._models[name]
        if not wait:
            state = f"{name} is being loaded; wait" if name in self._asked else f"{name}: choose it again"
            raise CapszooError(self._failed.get(name, state))
        self._failed.pop(name, None)
        self._asked.add(name)
        try:
            with self._lock:
                if name not in self._models:
                    self._models[name] = AppModel(name, self._folder)
                return self._models[name]
        except CapszooError as error:
            self._failed[name] = str(error)
            raise
        finally:
            self._asked.discard(name)


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
    panels: list[Any]
    sliders: list[Any]
    answer: Any

    @property
    def scored(self) -> list[Any]:
        """Components updated by ``_score``."""
        return [self.status, self.label, self.seen]

    @property
    def explained(self) -> list[Any]:
        """Components updated by ``_explain``, without the sliders, because each update costs the browser time."""
        return [self.answer, self.couplings, self.overlay, self.reconstruction, self.settled]

    @property
    def controls(self) -> list[Any]:
        """Controls of the user; their current values apply to an answer."""
        return [self.iterations, *self.sliders]


def _score(models: Models, name: str, image: Any, drawn: bool) -> list[Any]:
    """The values of ``_Column.scored``."""
    if name == NO_MODEL or image is None:
        return ["" if name == NO_MODEL else NOTHING, None, None]
    try:
        model = models.get(name, wait=False)
        answer = model.answer(image, drawn, explained=False)
    except CapszooError as error:
        return [str(error), None, None]
    sentences = [f"**{answer.label}** in {answer.milliseconds:.0f} ms", *answer.notes]
    if not model.routes:
        sentences.append("this network routes nothing, so it has no couplings")
    return ["; ".join(sentences), answer.top(), data_url(answer.view)]


def _explain(
    models: Models, name: str, image: Any, drawn: bool, iterations: int, offsets: Sequence[float]
) -> list[Any]:
    """The values of ``_Column.explained``."""
    if name == NO_MODEL or image is None:
        return [None] * 5
    try:
        model = models.get(name, wait=False)
        answer = model.answer(image, drawn)
    except CapszooError:  # reported by `_score`
        return [None] * 5
    couplings = overlay = settled = None
    if answer.explanation is not None:
        couplings = data_url(couplings_picture(answer.explanation, None))
        overlay = data_url(overlay_picture(answer.explanation, answer.view))
        settled = _settled(model, answer, iterations)
    decoded = data_url(model.reconstruct(answer, offsets)) if model.dims else None
    return [answer, couplings, overlay, decoded, settled]


def _settled(model: AppModel, answer: Answer, iterations: int) -> str | None:
    settled = model.settle(answer, int(iterations or model.iterations)) if model.iterations else None
    return None if settled is None else data_url(overlay_picture(settled, answer.view))


def _exported(columns: Sequence[tuple[AppModel, Answer, Sequence[float], int]], folder: Path) -> str:
    """A ZIP file of the displayed results: for each model its pictures, scores and settings."""
    for old in folder.glob("seen-*/capszoo.zip"):  # the page copies what it sends
        if time.time() - old.stat().st_mtime > KEEP_SECONDS:
            shutil.rmtree(old.parent, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix="seen-", dir=folder)) / "capszoo.zip"
    with zipfile.ZipFile(made, "w") as archive:

        def add(name: str, picture: Any) -> None:
            with archive.open(name, "w") as file:
                picture.save(file, "png")

        stems = [Path(model.name).name for model, *_ in columns]
        for number, (model, answer, offsets, iterations) in enumerate(columns, start=1):
            stem = stems[number - 1]
            if stems.count(stem) > 1:  # one model with two numbers of iterations, or runs of the same name
                stem = f"{stem}-{number}"
            add(f"{stem}/input.png", answer.view)
            exported: dict[str, Any] = {"model": model.name, **answer.to_dict()}
            if answer.explanation is not None:
                add(f"{stem}/couplings.png", couplings_picture(answer.explanation))
                add(f"{stem}/overlay.png", overlay_picture(answer.explanation, answer.view))
            settled = model.settle(answer, iterations) if model.iterations else None
            if settled is not None:
                add(f"{stem}/overlay-after-iterations.png", overlay_picture(settled, answer.view))
                exported["after_iterations"] = {
                    "routing_iterations": iterations,
                    "share_relative_to_even": settled.relative.nan_to_num(0).tolist(),
                }
            if model.dims:
                add(f"{stem}/reconstruction.png", model.reconstruct(answer, offsets))
                exported["capsule_offsets"] = list(offsets)[: model.dims]
            archive.writestr(f"{stem}/answer.json", json.dumps(exported, indent=1))
    return str(made)


def _column(gr: Any, number: int, names: list[str], chosen: str, model_: AppModel | None) -> _Column:
    def picture(title: str, id: str) -> Any:
        return gr.HTML(
            None,
            html_template=PICTURE.replace("TITLE", title),
            css_template=PICTURE_STYLE,
            elem_id=f"{id}-{number}",
            min_width=120,
        )

    dims, own = (0, 0) if model_ is None else (model_.dims, model_.iterations)
    with gr.Column(min_width=300):
        model = gr.Dropdown(names, value=chosen, label=f"Model {number}", elem_id=f"model-{number}")
        with gr.Column(visible=chosen != NO_MODEL, min_width=280) as body:
            status = gr.Markdown(NOTHING, elem_id=f"status-{number}")
            label = gr.Label(num_top_classes=5, label="Classes", elem_id=f"classes-{number}")
            with gr.Row():
                couplings = picture("Share of each position", "couplings")
                overlay = picture("On the image", "overlay")
            gr.HTML(scale_html())
            with gr.Row():
                seen, reconstruction = picture("Input", "seen"), picture("Reconstruction", "reconstruction")
            with (
                gr.Accordion("Dimensions of the winning capsule", visible=bool(dims)) as dimensions,
                gr.Row(),
            ):
                sliders = [
                    gr.Slider(
                        -MOST_OFFSET,
                        MOST_OFFSET,
                        value=0,
                        step=0.01,
                        label=f"dimension {i}",
                        visible=i < dims,
                        min_width=190,
                        elem_id=f"dim-{number}-{i}",
                    )
                    for i in range(MAX_DIMS)
                ]
            with gr.Accordion("Share by routing iteration", visible=bool(own)) as by_iteration:
                iterations = gr.Slider(
                    1,
                    MAX_ITERATIONS if model_ is None else model_.max_iterations,
                    value=own or 1,
                    step=1,
                    label="routing iterations",
                    visible=bool(own),
                    elem_id=f"iterations-{number}",
                )
                settled = picture("Share after that number of iterations", "settled")
            answer = gr.State(None, time_to_live=3600)
    shown = (model, body, label, status, seen, couplings, overlay, reconstruction, iterations, settled)
    return _Column(*shown, [dimensions, by_iteration], sliders, answer)


def build(models: Models, names: Sequence[str], first: str, folder: Path) -> Any:
    """The page as Gradio blocks.

    Args:
        models: the models of the page.
        names: models to choose from.
        first: model of the first column.
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
            left = _column(gr, 1, list(names), first, models.get(first))
            right = _column(gr, 2, [NO_MODEL, *names], NO_MODEL, None)
        picture = gr.State((None, False), time_to_live=3600)
        _wire(gr, models, folder, (left, right), (sketch, upload, message, export, exported, picture))
    return page


def _wire(gr: Any, models: Models, folder: Path, columns: Sequence[_Column], shared: tuple[Any, ...]) -> None:
    """Connect the page's inputs with its outputs."""
    sketch, upload, message, export, exported, picture = shared

    def score(image: Any, drawn: bool, values: Sequence[Any]) -> list[Any]:
        names = [name for name, *_ in _split(values, len(columns))]
        return [part for name in names for part in _score(models, name, image, drawn)]

    def explain(image: Any, drawn: bool, values: Sequence[Any]) -> list[Any]:
        shown: list[Any] = []
        for name, iterations, *offsets in _split(values, len(columns)):
            shown += _explain(models, name, image, drawn, iterations, offsets)
        return shown

    def score_drawing(drawing: str, *values: Any) -> list[Any]:
        image, note = _or_message(read_drawing, drawing)
        return [(image, True), note, *score(image, True, values)]

    def explain_drawing(drawing: str, *values: Any) -> list[Any]:
        image, _ = _or_message(read_drawing, drawing)
        return explain(image, True, values)

    def dropped(path: str | None, *values: Any) -> list[Any]:
        image, note = None, ""
        if path is not None:
            image, note = _or_message(read_upload, path)
            Path(path).unlink(missing_ok=True)
        return [(image, False), note, *score(image, False, values), *explain(image, False, values)]

    asked = [part for column in columns for part in (column.model, *column.controls)]
    scored = [picture, message, *(part for column in columns for part in column.scored)]
    explained = [part for column in columns for part in column.explained]
    # Both start at once: the couplings take several times as long as the scores, which do not wait for them.
    sketch.input(score_drawing, [sketch, *asked], scored, trigger_mode="always_last", **QUICK)
    sketch.input(explain_drawing, [sketch, *asked], explained, trigger_mode="always_last", **QUICK)
    upload.change(dropped, [upload, *asked], [*scored, *explained], trigger_mode="always_last", **QUICK)
    for column in columns:
        _wire_column(gr, models, column, picture)
    inputs = [part for c in columns for part in (c.model, c.answer, *c.controls)]

    def export_seen(*values: Any) -> tuple[Any, str]:
        seen = []
        for name, answer, iterations, *offsets in _split(values, len(columns)):
            if answer is not None and answer.model == name:  # else that model has not answered yet
                seen.append((models.get(name), answer, offsets, int(iterations or 1)))
        if not seen:
            return gr.update(visible=False), "**Nothing is shown yet: draw a digit, or drop an image.**"
        return gr.update(visible=True, value=_exported(seen, folder)), ""

    export.click(export_seen, inputs, [exported, message])


def _or_message(read: Any, source: str) -> tuple[Any, str]:
    """The result of reading a source, or an error message about it."""
    try:
        return read(source), ""
    except CapszooError as error:
        return None, f"**{error}**"


def _split(values: Sequence[Any], parts: int) -> list[Sequence[Any]]:
    """A sequence in equal parts."""
    width = len(values) // parts
    return [values[start : start + width] for start in range(0, len(values), width)]


def _wire_column(gr: Any, models: Models, column: _Column, picture: Any) -> None:
    """Connect the inputs of a column with its outputs."""

    def clear(name: str) -> list[Any]:
        return ["" if name == NO_MODEL else f"{name} is being loaded", *[None] * 7]

    def choose(name: str) -> list[Any]:
        dims = own = most = 0
        if name != NO_MODEL:
            with suppress(CapszooError):  # reported by `show`
                model = models.get(name)
                dims, own, most = model.dims, model.iterations, model.max_iterations
        controls = [gr.update(visible=bool(own), value=own or 1, maximum=most or MAX_ITERATIONS)]
        controls += [gr.update(visible=i < dims, value=0) for i in range(MAX_DIMS)]
        panels = [gr.update(visible=bool(dims)), gr.update(visible=bool(own))]
        return [gr.update(visible=name != NO_MODEL), *panels, *controls]

    def show(name: str, picture: tuple[Any, bool]) -> list[Any]:
        return [*_score(models, name, *picture), *_explain(models, name, *picture, 0, ())]

    def reconstruct(name: str, answer: Answer | None, *offsets: float) -> str | None:
        if answer is None or answer.poses is None or answer.model != name:
            return None
        return data_url(models.get(name).reconstruct(answer, offsets))

    def settle(name: str, answer: Answer | None, iterations: int) -> str | None:
        if answer is None or answer.model != name:
            return None
        return _settled(models.get(name), answer, iterations)

    shown = [*column.scored, *column.explained]
    # three events: at once, the answer of the model before goes; `show` takes the picture as it is after the loading
    cleared = column.model.change(clear, column.model, shown, **QUICK)
    chosen = cleared.then(choose, column.model, [column.body, *column.panels, *column.controls])
    chosen.then(show, [column.model, picture], shown)
    for slider in column.sliders:
        inputs = [column.model, column.answer, *column.sliders]
        slider.input(reconstruct, inputs, column.reconstruction, trigger_mode="always_last", **QUICK)
    moved = [column.model, column.answer, column.iterations]
    column.iterations.input(settle, moved, column.settled, trigger_mode="always_last", **QUICK)


def run(
    names: Sequence[str] = (), host: str = "127.0.0.1", port: int | None = None, browser: bool = False
) -> None:
    """Serve the page until it is stopped.

    Args:
        names: models to choose from, the first one first; empty uses ``DEFAULT_MODEL`` and every checkpoint.
        host: address to listen on. ``127.0.0.1`` accepts only this machine.
        port: port to listen on; None uses the first free one from 7860 on.
        browser: open the page in a browser.

    Raises:
        CapszooError: a model cannot be used, or the port is taken.
    """
    for name in names:
        check_model_argument(name)
    stored = [name for name, info in checkpoints().items() if not info.stored_as]
    offered = list(names) or [DEFAULT_MODEL, *(name for name in stored if name != DEFAULT_MODEL)]
    if threading.current_thread() is threading.main_thread():
        # a page that is stopped by a signal removes its files too
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="capszoo-app-") as folder:
        # read when gradio is imported, and with every upload
        os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
        os.environ["GRADIO_RUN_HISTORY"] = "False"  # it stores drawings in the browser
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
            raise CapszooError(
                f"the page cannot be served ({first_line(error)})", "choose another --port or --host"
            ) from None
        finally:
            page.close()
