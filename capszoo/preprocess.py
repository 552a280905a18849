"""Convert an image file to a model's input: reading, resizing, cropping, normalising.

The transform of a model is read from its pretrained configuration (size, mean, std, interpolation, crop), so that
``predict``, ``explain`` and the export's checks on real images all use exactly the same pixels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ._pretrained.facts import model_input_size, own_facts
from ._utils.choices import check_background
from ._utils.pixels import view
from .errors import CapszooError, UsageError
from .images import (
    CROP_MODES,
    IMAGE_SUFFIXES,
    Framing,
    ValueRange,
    default_background,
    find_images,
    one_line_errors,
    to_mode,
    upright_picture,
)
from .images import (
    open_image as load_image,
)

__all__ = [
    "IMAGE_SUFFIXES",
    "ImageLike",
    "ImageTransform",
    "as_image",
    "find_images",
    "is_image_like",
    "load_image",
    "model_framing",
    "model_input_size",
    "model_transform",
    "per_channel",
    "to_mode",
]

#: One image: a file's path, a picture, or an array (see ``as_image``).
ImageLike: TypeAlias = "str | Path | Image.Image | np.ndarray | Tensor"


def is_image_like(value: object) -> bool:
    """True if a value is one image, not several: a path, a picture, an array."""
    return isinstance(value, (str, Path, Image.Image, np.ndarray, Tensor))


def as_image(image: ImageLike) -> Image.Image:
    """Convert any representation of one image to a picture.

    Args:
        image: a file's path; a picture; an array or tensor, ``[h, w, c]`` of uint8 or ``[c, h, w]`` of
            floating-point numbers in 0..1, with 1 channel (grey), 3 (RGB) or 4 (RGB and opacity); ``[h, w]`` is grey.

    Raises:
        CapszooError: a file or a picture that cannot be read.
        UsageError: an array of an invalid shape, dtype or range, or no image at all.
    """
    if isinstance(image, (str, Path)):
        if str(image).startswith(("http://", "https://")):
            raise UsageError(f"{image} is on the web: images are read from files", "download it first")
        return load_image(image)
    if isinstance(image, Image.Image):
        return upright_picture(image)
    if not isinstance(image, (np.ndarray, Tensor)):
        raise UsageError(f"{type(image).__name__} is no image", "give a path, a PIL image or an array")
    if isinstance(image, Tensor):
        image = image.detach().cpu()
        image = image.float() if image.is_floating_point() else image  # numpy has no bfloat16
    array = np.asarray(image)
    taken = "arrays are [h, w, c] uint8 or [c, h, w] float in 0..1, with 1, 3 or 4 channels"
    shape = " x ".join(map(str, array.shape))
    if array.ndim == 4:
        raise UsageError(f"an array of {shape} is several images", "give a list of them: list(batch)")
    if array.dtype == np.uint8:
        array = array[..., None] if array.ndim == 2 else array
    elif np.issubdtype(array.dtype, np.floating) and array.ndim in (2, 3):
        array = array[None] if array.ndim == 2 else array
        if not (np.isfinite(array).all() and array.min(initial=0) >= 0 and array.max(initial=1) <= 1):
            raise UsageError("an array of floats with values outside 0..1", taken)
        array = np.rint(array.transpose(1, 2, 0) * 255).astype(np.uint8)
    else:
        raise UsageError(f"an array of {array.dtype}, {shape}", taken)
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or 0 in array.shape:
        raise UsageError(f"an array of {shape} is no image", taken)
    return Image.fromarray(np.ascontiguousarray(array[..., 0] if array.shape[2] == 1 else array))


@dataclass(frozen=True)
class ImageTransform:
    """Image to normalised tensor: resized and cropped, scaled to 0..1, normalised.

    With ``crop_pct`` 1, an image that already has the size is not resampled.

    Attributes:
        channels: 1 (grey) or 3 (RGB).
        size: height and width.
        mean, std: per channel, for values in 0..1.
        interpolation: ``nearest``, ``bilinear``, ``bicubic``, ``lanczos``, ``box`` or ``hamming``.
        crop_pct: share of the resized image that the crop keeps.
        background: ``black`` or ``white``: background for transparent pixels.
        object_size: height and width of objects in training on a larger canvas (affNIST, MultiMNIST): an image is
            resized and cropped to it, then padded to ``size`` with ``canvas``. One that already has ``size`` is a whole
            canvas. None: images fill the frame.
        invert: swap dark and bright.
        fit: centre and scale a drawing like the makers of MNIST (:func:`capszoo.images.fit_drawing`).
        canvas: ``black`` or ``white``: the padding around an object of ``object_size``, as in training.
        inherited_mean: ``mean`` and ``std`` are not those of the training images: nothing is known of their brightness,
            and no image is said to look inverted.
        crop_mode: ``center``, ``squash`` or ``border`` (see ``capszoo.images.resize_and_crop``).
        value_range: black and white in images of more than 8 bits a channel, as in training; None: each file's (see
            ``capszoo.images.open_image``).
    """

    channels: int
    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bilinear"
    crop_pct: float = 1.0
    background: str = "black"
    object_size: tuple[int, int] | None = None
    invert: bool = False
    fit: bool = False
    canvas: str = "black"
    inherited_mean: bool = False
    crop_mode: str = "center"
    value_range: ValueRange | None = None

    def view(self, image: Image.Image) -> Image.Image:
        """The part of the image that the model sees, at the model's size, in grey or RGB."""
        return self.read(image)[0]

    def read(self, image: Image.Image, name: str | Path = "an image") -> tuple[Image.Image, tuple[str, ...]]:
        """The image as the model sees it, and notes on how it was read.

        Raises:
            CapszooError: an image that cannot be converted; the message begins with ``name``.
        """
        settings = {name: value for name, value in vars(self).items() if name != "std"}
        with one_line_errors(name):
            return view(image, **settings)

    def __call__(self, image: Image.Image) -> Tensor:
        """Image to ``[c, h, w]``, float32."""
        return self.normalise(self.view(image))

    def normalise(self, view: Image.Image) -> Tensor:
        """The result of :meth:`view` or :meth:`read` to ``[c, h, w]``, float32."""
        pixels = np.asarray(view, dtype=np.float32) / 255
        tensor = torch.from_numpy(pixels.reshape(*self.size, self.channels)).permute(2, 0, 1)
        return (tensor - self._column(self.mean)) / self._column(self.std)

    def restore(self, tensor: Tensor) -> Tensor:
        """Normalised ``[..., c, h, w]`` back to values in 0..1, on the CPU."""
        return (tensor.detach().float().cpu() * self._column(self.std) + self._column(self.mean)).clamp(0, 1)

    def _column(self, values: tuple[float, ...]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device="cpu").view(-1, 1, 1)


def model_transform(
    model: nn.Module, *, background: str | None = None, invert: bool = False, fit: bool = False
) -> ImageTransform:
    """The transform that a model's weights were trained for.

    Args:
        model: its configuration determines the other settings.
        background: ``black`` or ``white`` for transparent pixels; None uses the value in the weights' metadata.
        invert, fit: see :class:`ImageTransform`.

    Raises:
        CapszooError: the model's input is not a single grey or colour image.
        UsageError: an unknown background, or a model that states no input size.
    """
    cfg: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    channels, height, width = model_input_size(model)
    if channels not in (1, 3):
        raise CapszooError(
            f"the model takes {channels} channels, which is no single image",
            "call the module itself with a tensor [b, c, h, w], or create it with in_chans=1 or 3",
        )
    check_background(background)
    own = own_facts(cfg)
    trained_on = tuple((cfg.get("input_size") or (0, 0, 0))[-2:])
    objects = tuple(own.get("object_size") or ()) if trained_on == (height, width) else ()
    trained_background = own.get("background") or default_background(channels)
    interpolation = str(cfg.get("interpolation") or "")
    return ImageTransform(
        channels=channels,
        size=(height, width),
        mean=per_channel(cfg.get("mean") or (0.0,), channels),
        std=per_channel(cfg.get("std") or (1.0,), channels),
        # not one of Pillow's: such as timm's "random"
        interpolation=interpolation if interpolation.upper() in Image.Resampling.__members__ else "bilinear",
        crop_pct=float(cfg.get("crop_pct") or 1.0),
        background=background or trained_background,
        object_size=objects if objects and objects != (height, width) else None,
        invert=invert,
        fit=fit,
        canvas=trained_background,
        inherited_mean=bool(own.get("inherited_mean")),
        crop_mode=_crop_mode(cfg),
        value_range=_value_range(own),
    )


def model_framing(model: nn.Module) -> Framing:
    """How data sets are framed for a model, as in ``model_transform``."""
    cfg: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    channels = model_input_size(model)[0]
    mean = per_channel(cfg["mean"], channels) if cfg.get("mean") else ()
    return Framing(_crop_mode(cfg), mean, _value_range(own_facts(cfg)))


def _crop_mode(cfg: dict[str, Any]) -> str:
    mode = cfg.get("crop_mode")
    return mode if mode in CROP_MODES else "center"


def _value_range(own: dict[str, Any]) -> ValueRange | None:
    black, white = own.get("value_range") or (0, 0)
    return (float(black), float(white)) if white > black else None


def per_channel(values: Iterable[float], channels: int) -> tuple[float, ...]:
    """One value per channel; if the number of values differs, their mean for each channel."""
    numbers = tuple(float(value) for value in values)
    return numbers if len(numbers) == channels else (sum(numbers) / len(numbers),) * channels
