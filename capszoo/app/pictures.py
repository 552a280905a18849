"""Pictures of the page, drawn with numpy because they are updated with every stroke."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from ..explain.heat_map import COLOURS, MEANINGS, REACH

if TYPE_CHECKING:
    from ..explain import Explanation

#: Side of a picture on the page, in pixels.
SIDE = 280

#: Gradio template of a picture; its value is a ``data:`` URL, so that no file is written or fetched.
PICTURE = """<div style="visibility:${value ? "visible" : "hidden"}"><div>TITLE</div>
<div class="frame">${value ? `<img src="${value}" alt="TITLE">` : ""}</div></div>"""

#: Style of a picture. Enlarged pixels stay squares.
PICTURE_STYLE = f"""
.frame {{ width: 100%; max-width: {SIDE}px; aspect-ratio: 1; border: 1px solid var(--border-color-primary); }}
.frame img {{ width: 100%; height: 100%; object-fit: contain; image-rendering: pixelated; }}
"""


def data_url(image: Image.Image) -> str:
    """An image as a PNG file in a ``data:`` URL."""
    file = io.BytesIO()
    image.save(file, "png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def enlarged(image: Image.Image, side: int = SIDE) -> Image.Image:
    """An image in RGB at ``side`` pixels, each pixel a square."""
    return image.convert("RGB").resize(
        (side, round(side * image.height / image.width)), Image.Resampling.NEAREST
    )


def _colours(relative: np.ndarray) -> np.ndarray:
    """Multiples of an even share to RGB in 0..255, on the scale of ``capszoo.explain``."""
    from matplotlib import colormaps

    share = ((relative - (1 - REACH)) / (2 * REACH)).clip(0, 1)
    return np.asarray(colormaps[COLOURS](share))[..., :3] * 255


def couplings_picture(explanation: Explanation, side: int | None = SIDE) -> Image.Image:
    """The grid of couplings: white is an even share, blue less, red more; grey where no window covers it.

    Args:
        explanation: the couplings.
        side: side of the picture; None makes one pixel per position.
    """
    grid = _colours(explanation.relative.nan_to_num(1.0).numpy())
    grid[~explanation.covered.numpy()] = 160
    picture = Image.fromarray(grid.round().astype(np.uint8))
    return picture if side is None else enlarged(picture, side)


def overlay_picture(explanation: Explanation, view: Image.Image, side: int = SIDE) -> Image.Image:
    """The image overlaid with its couplings; opacity grows with the distance from an even share."""
    base = np.asarray(enlarged(view, side), dtype=np.float64)
    heat = explanation.heat_at(*base.shape[:2]).numpy()
    strength = 0.8 * np.abs(heat - 1).clip(0, 1)[..., None]
    return Image.fromarray((base * (1 - strength) + _colours(heat) * strength).round().astype(np.uint8))


def scale_html() -> str:
    """The colour scale of the couplings, and what they show, as HTML."""
    stops = ", ".join(
        f"rgb({r:.0f},{g:.0f},{b:.0f}) {100 * at:.0f}%"
        for at in np.linspace(0, 1, 9)
        for r, g, b in [_colours(np.array([1 - REACH + at * 2 * REACH]))[0]]
    )
    return (
        f'<div class="capszoo-scale"><div style="height:10px;background:linear-gradient(90deg,{stops})"></div>'
        '<div style="display:flex;justify-content:space-between;font-size:12px">'
        "<span>0</span><span>1: even share</span><span>2 and more</span></div>"
        f'<div style="font-size:12px">{MEANINGS["couplings"]}</div></div>'
    )
