"""Figures for files: matplotlib, loaded when the first one is drawn, and written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

from ..errors import CapszooError, UsageError, require

__all__ = ["for_display", "image_style", "new_figure", "require_matplotlib", "save", "save_columns", "show"]


def require_matplotlib(what: str) -> None:
    """Raise `CapszooError`, before anything is computed, where figures cannot be drawn."""
    require(what, ["matplotlib"], "explain")


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches, which needs no display.

    Raises:
        CapszooError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise CapszooError("figures need matplotlib", "pip install 'capszoo[explain]'") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: str | Path, about: str | None = None) -> Path:
    """Write a figure as the kind of file that its suffix says.

    Args:
        figure: from :func:`new_figure`.
        path: with the suffix of an image format.
        about: a note kept in the file (PNG and SVG: ``Description``).

    Raises:
        CapszooError: the file cannot be written.
        UsageError: a suffix that is no image format.
    """
    path = Path(path)
    temporary = path.with_name(f".{os.getpid()}.{path.name}")  # its suffix says the format
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(temporary, dpi=150, metadata={"Description": about} if about else None)
        temporary.replace(path)
    except ValueError:
        raise UsageError(f"{path}: cannot write this kind of file", "use .png, .pdf or .svg") from None
    except OSError as e:
        raise CapszooError(f"{path}: cannot be written ({e.strerror})", "choose another place") from None
    finally:
        if path.parent.is_dir():
            temporary.unlink(missing_ok=True)
    return path


def save_columns(
    columns: Sequence[tuple[str, Sequence[Tensor]]],
    rows: Sequence[str],
    path: str | Path,
    about: str | None = None,
) -> Path:
    """Draw pictures ``[c, h, w]`` of 0..1 in columns, each below its title, and name the rows on the left.

    Raises `UsageError` where there is none, and what :func:`save` raises.
    """
    if not columns:
        raise UsageError("there is nothing to draw", "give more images")
    figure = new_figure(1.3 * len(columns) + 1.0, 1.25 * len(rows) + 0.6)
    grid = figure.subplots(len(rows), len(columns), squeeze=False)
    for column, (title, pictures) in enumerate(columns):
        for row, picture in enumerate(pictures):
            show(grid[row][column], picture)
        grid[0][column].set_title(title, fontsize=7)
    for row, name in enumerate(rows):
        grid[row][0].set_ylabel(name, fontsize=7)
    return save(figure, path, about)


def show(axes: Any, image: Tensor) -> None:
    """Draw ``[c, h, w]`` of 0..1 and nothing around it."""
    picture = for_display(image)
    axes.imshow(picture, **image_style(picture))
    axes.set(xticks=[], yticks=[])
    for side in axes.spines.values():
        side.set_visible(False)


def for_display(image: Tensor) -> Any:
    """``[c, h, w]`` as ``[h, w]`` or ``[h, w, 3]``."""
    return image[0].numpy() if image.shape[0] == 1 else image.permute(1, 2, 0).numpy()


def image_style(image: Any) -> dict[str, Any]:
    """How ``imshow`` is to show what :func:`for_display` gave."""
    return {"cmap": "gray", "vmin": 0, "vmax": 1} if image.ndim == 2 else {}
