"""Augmentation of a batch as tensor operations on the images' device, with separate random numbers for each image.

``Augment.draw`` draws the random numbers of a whole global batch from one CPU generator, ``Augment.apply`` uses one
process's share of them: the images are the same on every device and for every number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from .errors import DataError
from .specs import Side, both_sides

#: Random numbers by name, one row per image of the global batch.
Draws = dict[str, Tensor]


@dataclass(frozen=True)
class Augment:
    """Augmentation of training images; the defaults change nothing.

    Order: resize, scale, shear and rotation, squeeze and tilt, shift within the margin, shift and flip, colours, erase,
    cutout.

    Attributes:
        resize: side, or rows and columns, to which the images are resized once, when they are loaded; a patch of the
            model's input size is then cropped at random (in the middle without randomness).
        rotation: largest angle in degrees, either way.
        shear: largest horizontal shear, either way: a row y pixels off the middle moves by shear * y.
        scale: smallest and largest factor of the size.
        shift: largest shift in pixels, filled with black; equivalent to padding by it and cropping at random.
        flip: mirror half of the images left to right, drawn again in each epoch; or ``"alternating"``: each image is
            mirrored in every other epoch, and its first epoch is drawn once (Jordan 2024, arXiv:2404.00498).
        pad_mode: content that a shift brings in: ``"constant"`` (black) or ``"reflect"`` (the image mirrored at its
            edge).
        cutout: side in pixels of a square that is set to the data set's mean; its middle is uniform over the
            image, so part of it may lie outside (DeVries and Taylor 2017, arXiv:1708.04552); 0: none.
        brightness, contrast, saturation: largest relative change x; the factor is in 1 - x to 1 + x.
        hue: largest change as a share of the colour circle, at most 0.5.
        tilt: rotate half of the images; the angle in degrees is this times a normal variable of standard deviation
            0.33, clipped to -1..1.
        squeeze: largest relative reduction of the width about the middle, at least 0 and below 1.
        shift_in_margin: shift each image at random within its blank (black) margin, so that nothing is cut off.
        erase: side of a square, entirely inside the image, that becomes black.
    """

    resize: Side | None = None
    rotation: float = 0.0
    shear: float = 0.0
    scale: tuple[float, float] = (1.0, 1.0)
    shift: int = 0
    flip: bool | Literal["alternating"] = False
    pad_mode: Literal["constant", "reflect"] = "constant"
    cutout: int = 0
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    tilt: float = 0.0
    squeeze: float = 0.0
    shift_in_margin: bool = False
    erase: int = 0

    def __post_init__(self) -> None:
        low, high = self.scale
        limits = {
            "resize": (self.resize is None or min(both_sides(self.resize)) > 0, "pixels, at least 1"),
            "rotation": (0 <= self.rotation <= 180, "0 to 180 degrees"),
            "shear": (0 <= self.shear <= 2, "0 to 2"),
            "scale": (0 < low <= high < math.inf, "smallest and largest factor, above 0"),
            "shift": (self.shift >= 0, "pixels, at least 0"),
            "flip": (self.flip in (False, True, "alternating"), "true, false or alternating"),
            "pad_mode": (self.pad_mode in ("constant", "reflect"), "constant or reflect"),
            "cutout": (self.cutout >= 0, "pixels, at least 0"),
            "brightness": (0 <= self.brightness <= 1, "0 to 1"),
            "contrast": (0 <= self.contrast <= 1, "0 to 1"),
            "saturation": (0 <= self.saturation <= 1, "0 to 1"),
            "hue": (0 <= self.hue <= 0.5, "0 to 0.5"),
            "tilt": (0 <= self.tilt <= 180, "0 to 180 degrees"),
            "squeeze": (0 <= self.squeeze < 1, "0 to below 1"),
            "erase": (self.erase >= 0, "pixels, at least 0"),
        }
        for name, (good, range_) in limits.items():
            if not good:
                raise DataError(f"augment.{name}: {getattr(self, name)} is out of range ({range_})")

    @property
    def warps(self) -> bool:
        return bool(self.rotation or self.shear or self.scale != (1.0, 1.0))

    @property
    def changes(self) -> list[str]:
        """Names of the settings that differ from the defaults, which change nothing."""
        return [field.name for field in fields(self) if getattr(self, field.name) != field.default]

    def check_channels(self, channels: int) -> None:
        """Raise ``DataError`` if a setting needs colour and there is none."""
        if channels != 3 and (self.saturation or self.hue):
            raise DataError(f"augment.saturation and augment.hue need 3 channels, the images have {channels}")

    def draw(
        self,
        n: int,
        margin: tuple[int, int],
        generator: torch.Generator,
        mirrored: Tensor | None = None,
        size: tuple[int, int] | None = None,
    ) -> Draws:
        """Draw the random numbers of a batch.

        Args:
            n: images in the global batch.
            margin: rows and columns by which the images are larger than the model's input.
            generator: generator for this batch.
            mirrored: bool [n], images to mirror instead of a random half; required for alternating flips.
            size: rows and columns of the model's input; required for cutout.
        """
        draws: Draws = {}
        if self.shift or self.flip or any(margin):
            # The order of these two must not change: with the same seed, a resumed run must see the same images.
            draws["top"], draws["left"] = (
                torch.randint(0, 2 * self.shift + space + 1, (n,), generator=generator) for space in margin
            )
            random_half = torch.rand(n, 1, generator=generator)[:, 0] < 0.5
            if self.flip == "alternating" and mirrored is None:
                raise ValueError("alternating flips need to be told which images are mirrored in this epoch")
            if self.flip:
                draws["mirrored"] = random_half if mirrored is None else mirrored

        def uniform(low: float, high: float) -> Tensor:
            return low + (high - low) * torch.rand(n, generator=generator)

        if self.warps:
            factor = uniform(*self.scale)
            draws["matrix"] = affine_matrices(
                uniform(-self.rotation, self.rotation), uniform(-self.shear, self.shear), factor, factor
            )
        for name in ("brightness", "contrast", "saturation"):
            if largest := getattr(self, name):
                draws[name] = uniform(1 - largest, 1 + largest)
        if self.hue:
            draws["hue"] = uniform(-self.hue, self.hue)
        if self.cutout:
            if size is None:
                raise ValueError("cutout needs the size of the model's input")
            # The middle of the square. The order must not change: a resumed run must see the same images.
            draws["cut_row"], draws["cut_col"] = (
                torch.randint(0, side, (n,), generator=generator) for side in size
            )
        if self.tilt or self.squeeze:
            draws["matrix"] = self._tilt_and_squeeze(n, draws.get("matrix"), generator)
        if self.shift_in_margin:
            draws["in_margin"] = torch.rand(n, 2, generator=generator)
        if self.erase:
            draws["erased"] = torch.rand(n, 2, generator=generator)
        return draws

    def _tilt_and_squeeze(self, n: int, before: Tensor | None, generator: torch.Generator) -> Tensor:
        """Matrices [n, 2, 2] of the squeeze and then the tilt, applied after those of ``before``."""
        tilted = torch.rand(n, generator=generator) < 0.5
        angle = self.tilt * (0.33 * torch.randn(n, generator=generator)).clamp_(-1, 1) * tilted
        width = 1 - self.squeeze * torch.rand(n, generator=generator)
        one = torch.ones(n)
        matrix = affine_matrices(angle, 0 * one, one, width)
        return matrix if before is None else matrix @ before

    def apply(
        self, pixels: Tensor, draws: Draws, size: tuple[int, int], fill: tuple[float, ...] | None = None
    ) -> Tensor:
        """Augment uint8 [b, c, h, w] to uint8 [b, c, *size] with the random numbers of ``draw``.

        ``fill``: colour of cutout, per channel in 0..1 (the mean of the data set); None: black.
        """
        result = pixels
        if "matrix" in draws:
            result = warp(result.float(), draws["matrix"])
        if "in_margin" in draws:
            result = shift_in_margin(result, draws["in_margin"])
        if "top" in draws:
            result = crop(
                result, draws["top"], draws["left"], size, self.shift, draws.get("mirrored"), self.pad_mode
            )
        colours = {
            name: draws[name] for name in ("brightness", "contrast", "saturation", "hue") if name in draws
        }
        if colours:
            # Channels-first planes: a crop's result is channels-last, which is slower here.
            planes = result.to(torch.float32, memory_format=torch.contiguous_format)
            result = jitter(planes / 255, **colours) * 255
        if result.dtype != torch.uint8:
            result = result.round_().clamp_(0, 255).to(torch.uint8)
        if "erased" in draws:  # after the colours, which would change its black
            result = erase(result, draws["erased"], self.erase)
        if "cut_row" in draws:
            result = cut_out(result, draws["cut_row"], draws["cut_col"], self.cutout, fill)
        return result


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor on a device; on CUDA without waiting for the GPU, as a copy from pageable memory would."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def share(draws: Draws, rank: int, world: int) -> Draws:
    """The random numbers for one process's images."""
    return draws if world == 1 else {name: numbers[rank::world] for name, numbers in draws.items()}


def crop(
    images: Tensor,
    top: Tensor,
    left: Tensor,
    size: tuple[int, int],
    padding: int = 0,
    mirrored: Tensor | None = None,
    pad_mode: str = "constant",
) -> Tensor:
    """Crop a window from each padded image, and mirror some of them left to right.

    Args:
        images: [b, c, h, w], any dtype and memory format.
        top, left: first row and column of each window [b], counted in the padded image.
        size: rows and columns of the windows.
        padding: pixels added on each side.
        mirrored: bool [b], or None.
        pad_mode: ``"constant"``: black; ``"reflect"``: the image mirrored at its edge, which is not repeated.

    Returns:
        [b, c, *size].
    """
    device = images.device
    rows = send(top, device)[:, None] + torch.arange(size[0], device=device)  # [b, rows]
    cols = send(left, device)[:, None] + torch.arange(size[1], device=device)  # [b, cols]
    if mirrored is not None:
        cols = torch.where(send(mirrored, device)[:, None], cols.flip(1), cols)
    if pad_mode == "reflect":
        if padding >= min(images.shape[2:]):
            raise DataError(
                f"augment.shift: {padding} pixels cannot be reflected in images of {tuple(images.shape[2:])}"
            )
        rows, cols = reflected(rows - padding, images.shape[2]), reflected(cols - padding, images.shape[3])
        padding = 0
    padded = F.pad(images, (padding, padding, padding, padding)).permute(0, 2, 3, 1)
    b, h, w, c = padded.shape
    batch = torch.arange(b, device=device)[:, None, None]
    pixel = (batch * h + rows[:, :, None]) * w + cols[:, None, :]  # [b, rows, cols]
    # One selection of pixels does it all, on a CPU twice as fast as indexing three axes; the result is channels-last.
    picked = padded.reshape(b * h * w, c).index_select(0, pixel.flatten())
    return picked.view(*pixel.shape, c).permute(0, 3, 1, 2)


def reflected(places: Tensor, size: int) -> Tensor:
    """Places beyond an edge (-size < p < 2 size - 1) reflected into 0 to size - 1: -1 becomes 1, size size - 2."""
    return (size - 1) - ((size - 1) - places.abs()).abs()


def rectangles(images: Tensor, top: Tensor, bottom: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """The pixels of one rectangle in each image, bool [b, 1, h, w]; the last row and column [b] are not included."""
    row, col = (torch.arange(places, device=images.device) for places in images.shape[2:])
    rows = (row >= top[:, None]) & (row < bottom[:, None])
    cols = (col >= left[:, None]) & (col < right[:, None])
    return rows[:, None, :, None] & cols[:, None, None, :]


def cut_out(
    images: Tensor, row: Tensor, col: Tensor, side: int, fill: tuple[float, ...] | None = None
) -> Tensor:
    """Set a square of each image to one colour; parts of it outside the image are ignored.

    Args:
        images: uint8 [b, c, h, w].
        row, col: middle of each square [b].
        side: side of the squares, in pixels.
        fill: colour, per channel in 0..1; None: black.

    Returns:
        uint8 [b, c, h, w].
    """
    top, left = (send(middle, images.device) - side // 2 for middle in (row, col))
    square = rectangles(images, top, top + side, left, left + side)
    colour = _per_channel(tuple(fill or (0.0,)), images.device).mul(255).round().to(images.dtype)
    return torch.where(square, colour, images)


def shift_in_margin(images: Tensor, draws: Tensor) -> Tensor:
    """Shift each image within its blank margin, so that no non-black pixel is cut off.

    Args:
        images: [b, c, h, w], 0..255; a pixel below 0.5 in all channels is black.
        draws: [b, 2], in 0..1: place of the content, from the first possible row (column) to the last.

    Returns:
        A tensor like ``images``.
    """
    shape = images.shape
    index = []
    for axis, u in zip((2, 3), draws.to(images.device).unbind(1), strict=True):
        size = shape[axis]
        filled = (images >= 0.5).any(dim=1).any(dim=4 - axis)  # [b, size]
        ahead = filled.int().argmax(1)  # blank rows before the content
        free = ahead + filled.flip(1).int().argmax(1)
        shift = (u * (free + 1)).floor().clamp(max=free) - ahead  # any shift leaves an empty image the same
        index.append((torch.arange(size, device=images.device) - shift[:, None]).remainder(size).long())
    batch = torch.arange(shape[0], device=images.device)[:, None, None]
    # within the margin, a cyclic shift moves only black pixels around the edge
    picked = images.permute(0, 2, 3, 1)[batch, index[0][:, :, None], index[1][:, None, :]]
    return picked.permute(0, 3, 1, 2)


def erase(images: Tensor, draws: Tensor, side: int) -> Tensor:
    """Blacken a square of each image, inside it; ``draws`` [b, 2] in 0..1 determine its first row and column."""
    sizes, draws = images.shape[2:], draws.to(images.device)
    top, left = (
        (u * (max(size - side, 0) + 1)).floor() for u, size in zip(draws.unbind(1), sizes, strict=True)
    )
    return images.masked_fill(rectangles(images, top, top + side, left, left + side), 0)


def affine_matrices(degrees: Tensor, shear: Tensor, scale_y: Tensor, scale_x: Tensor) -> Tensor:
    """Rotation (counter-clockwise) after shear after scaling: [b] each to [b, 2, 2] on (x, y), y downwards."""
    angle = torch.deg2rad(degrees)
    cos, sin, zero, one = angle.cos(), angle.sin(), torch.zeros_like(angle), torch.ones_like(angle)

    def matrix(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return torch.stack((a, b, c, d), dim=-1).view(-1, 2, 2)

    return matrix(cos, sin, -sin, cos) @ matrix(one, shear, zero, one) @ matrix(scale_x, zero, zero, scale_y)


def warp(images: Tensor, matrices: Tensor, size: tuple[int, int] | None = None) -> Tensor:
    """Transform each image about its middle by a 2x2 matrix, bilinearly; pixels without a source are black.

    Args:
        images: float [b, c, h, w].
        matrices: [b, 2, 2] on pixel coordinates (x, y) relative to the middle, from image to result.
        size: rows and columns of the result, which has the same middle; None keeps h and w.

    Returns:
        float [b, c, *size].
    """
    b, c, h, w = images.shape
    rows, cols = size or (h, w)
    y, x = torch.meshgrid(
        torch.arange(rows) - (rows - 1) / 2, torch.arange(cols) - (cols - 1) / 2, indexing="ij"
    )
    points = torch.stack((x, y), dim=-1).view(1, -1, 2)
    # Source of each pixel of the result, in grid_sample's units: -1 and 1 are the image's edges.
    sources = points @ torch.linalg.inv(matrices).mT * torch.tensor([2 / w, 2 / h])
    grid = sources.view(b, rows, cols, 2).to(images)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def jitter(
    images: Tensor,
    brightness: Tensor | None = None,
    contrast: Tensor | None = None,
    saturation: Tensor | None = None,
    hue: Tensor | None = None,
) -> Tensor:
    """Change colours, each image by its factors, in this order (torchvision's operations; it draws the order).

    Args:
        images: float [b, c, h, w] in 0..1; c = 3 for saturation and hue.
        brightness: factors [b] of the values.
        contrast: factors [b] of the distance to the image's mean grey.
        saturation: factors [b] of the distance to the pixel's grey.
        hue: [b], rotations of the hue as shares of the colour circle.

    Returns:
        float [b, c, h, w] in 0..1.
    """

    def blend(other: Tensor | float, factor: Tensor) -> Tensor:
        f = factor.to(images).view(-1, 1, 1, 1)
        return (other + f * (images - other)).clamp_(0, 1)

    if brightness is not None:
        images = blend(0.0, brightness)
    if contrast is not None:
        images = blend(_grey(images).mean((1, 2, 3), keepdim=True), contrast)
    if saturation is not None:
        images = blend(_grey(images), saturation)
    if hue is not None:
        images = _turn_hue(images, hue.to(images))
    return images


def _grey(images: Tensor) -> Tensor:
    """[b, c, h, w] to [b, 1, h, w]: ITU-R 601-2 luma for three channels, else the mean."""
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True)
    r, g, b = images.split(1, dim=1)
    return 0.299 * r + 0.587 * g + 0.114 * b


def _turn_hue(images: Tensor, turn: Tensor) -> Tensor:
    """Rotate hues by ``turn`` [b] of the circle, keeping HSV's saturation and value."""
    r, g, b = images.unbind(1)  # [b, h, w]
    value, low = images.amax(1), images.amin(1)
    chroma = value - low
    safe = chroma.clamp(min=1e-7)
    # The hue in sixths of the circle.
    sixth = torch.where(
        value == r, (g - b) / safe, torch.where(value == g, 2 + (b - r) / safe, 4 + (r - g) / safe)
    )
    sixth = sixth + 6 * turn.view(-1, 1, 1)
    # Inverse in closed form: a channel is the value minus the chroma times a trapezium function of the hue.
    offsets = torch.tensor([5.0, 3.0, 1.0], device=images.device).view(1, 3, 1, 1)
    k = (offsets + sixth[:, None]).remainder(6)
    fall = torch.minimum(k, 4 - k).clamp_(0, 1)
    return (value[:, None] - chroma[:, None] * fall).clamp_(0, 1)


def frame(
    images: Tensor, size: tuple[int, int], crop_mode: str = "center", mean: Sequence[float] = ()
) -> Tensor:
    """uint8 [n, c, h, w] to uint8 [n, c, *size], framed like files (``capszoo.images.resize_and_crop``).

    A crop begins at a whole pixel, so it may be half of one away from a file's.

    Args:
        images: the images.
        size: rows and columns of the result.
        crop_mode: center, squash or border.
        mean: per channel, for values in 0..1: the padding of border; black if empty.
    """
    height, width = images.shape[-2:]
    down, across = size[0] / height, size[1] / width
    if crop_mode == "center":
        scale = max(down, across)
        tall, wide = min(height, round(size[0] / scale)), min(width, round(size[1] / scale))
        top, left = (height - tall) // 2, (width - wide) // 2
        return resize(images[..., top : top + tall, left : left + wide], size)
    if crop_mode == "squash":
        return resize(images, size)
    if len(mean) not in (0, images.shape[1]):  # of a model for colour, and images in grey
        mean = (sum(mean) / len(mean),) * images.shape[1]
    scale = min(down, across)
    tall, wide = max(1, round(height * scale)), max(1, round(width * scale))
    fill = torch.tensor([round(255 * value) for value in mean] or [0], device=images.device)
    canvas = fill.clamp(0, 255).to(torch.uint8).reshape(1, -1, 1, 1)
    canvas = canvas.expand(len(images), images.shape[1], *size).contiguous()
    top, left = (size[0] - tall) // 2, (size[1] - wide) // 2
    canvas[..., top : top + tall, left : left + wide] = resize(images, (tall, wide))
    return canvas


def resize(images: Tensor, size: tuple[int, int], chunk: int = 4096) -> Tensor:
    """uint8 [n, c, h, w] to uint8 [n, c, *size], bilinear with antialiasing, a chunk at a time."""
    if tuple(images.shape[2:]) == size:
        return images
    parts = [
        F.interpolate(part.float(), size, mode="bilinear", antialias=True)
        .round_()
        .clamp_(0, 255)
        .to(torch.uint8)
        for part in images.split(chunk)
    ]
    return torch.cat(parts)


@lru_cache(64)
def _per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Constants [1, c, 1, 1] on a device, sent once: each copy to a GPU would wait for it."""
    return torch.tensor(values, device=device).view(1, -1, 1, 1)


def normalize(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """uint8 [b, c, h, w] to float32 with (x / 255 − mean) / std per channel, in one multiply-add."""
    scale = _per_channel(tuple(1 / (255 * s) for s in std), images.device)
    offset = _per_channel(tuple(-m / s for m, s in zip(mean, std, strict=True)), images.device)
    return torch.addcmul(offset, images.float(), scale)
