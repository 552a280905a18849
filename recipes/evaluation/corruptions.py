"""Accuracy on corrupted images: twelve of the fifteen corruptions of CIFAR-10-C and of MNIST-C, regenerated.

The published sets cannot be regenerated pixel by pixel: their random numbers are not published. The parameters are
those of the papers' generators, the implementations are ours. Left out is what needs further images or libraries:
motion blur, snow and frost of CIFAR-10-C; motion blur, spatter and edges of MNIST-C.

Sources: Hendrycks and Dietterich 2019 (arXiv:1903.12261), for images of 32x32; Mu and Gilmer 2019 (arXiv:1906.02337),
for images of 28x28.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Generator, Tensor

from capszoo.data import keyed_generator
from capszoo.data.augment import affine_matrices, crop, warp
from capszoo.errors import CapszooError

from .metrics import all_right
from .target import EvalTarget

#: Images whose random numbers are drawn together: the result does not depend on the batch size.
BLOCK = 250


@dataclass(frozen=True)
class Corruption:
    """A corruption with its severities.

    Attributes:
        group: the kind of corruption, as the papers group them.
        apply: from float images [b, c, h, w] in 0..1, the parameters of a severity and a generator to the corrupted
            images, which may exceed 0..1.
        severities: the parameters of each severity, the weakest first.
    """

    group: str
    apply: Callable[[Tensor, Any, Generator], Tensor]
    severities: tuple[Any, ...]


@dataclass(frozen=True)
class CorruptionResult:
    """Accuracy in per cent (``all_right``) for each severity of one corruption, the weakest first."""

    name: str
    group: str
    accuracy: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over the severities."""
        return sum(self.accuracy) / len(self.accuracy)


def mean_accuracy(results: Sequence[CorruptionResult]) -> float:
    """The mean over corruptions, which count equally, of the mean over severities."""
    return sum(result.mean for result in results) / len(results)


def _uniform(shape: tuple[int, ...], low: float, high: float, generator: Generator) -> Tensor:
    return torch.rand(shape, generator=generator) * (high - low) + low


def _sign(count: int, generator: Generator) -> Tensor:
    """-1 or 1, [count]."""
    return torch.randint(0, 2, (count,), generator=generator) * 2.0 - 1


def _gaussian_blur(x: Tensor, sigma: float, mode: str = "nearest", truncate: float = 4.0) -> Tensor:
    """Blur the last two axes."""
    from scipy.ndimage import gaussian_filter

    sigmas = [0.0] * (x.dim() - 2) + [sigma, sigma]
    return torch.from_numpy(gaussian_filter(x.numpy(), sigmas, mode=mode, truncate=truncate))


def _gaussian_noise(x: Tensor, deviation: float, generator: Generator) -> Tensor:
    return x + deviation * torch.randn(x.shape, generator=generator)


def _shot_noise(x: Tensor, photons: float, generator: Generator) -> Tensor:
    return torch.poisson(x * photons, generator) / photons


def _impulse_noise(x: Tensor, share: float, generator: Generator) -> Tensor:
    """Set a share of the values to 0 or 1, half each."""
    u = torch.rand(x.shape, generator=generator)
    return x.masked_fill(u < share / 2, 0.0).masked_fill(u >= 1 - share / 2, 1.0)


def _defocus_blur(x: Tensor, parameters: tuple[float, float], generator: Generator) -> Tensor:
    """Convolve with a disc, of which a Gaussian of 3x3 smooths the edge."""
    radius, smoothing = parameters
    places = torch.arange(-8.0, 9.0)
    disc = ((places[:, None] ** 2 + places**2) <= radius**2).float()
    edge = torch.exp(-0.5 * (torch.arange(-1.0, 2.0) / smoothing) ** 2)
    kernel = F.conv2d(
        (disc / disc.sum())[None, None], (edge[:, None] * edge / edge.sum() ** 2)[None, None], padding=1
    )
    channels = x.shape[1]
    return F.conv2d(
        F.pad(x, (8, 8, 8, 8), mode="reflect"), kernel.expand(channels, 1, 17, 17), groups=channels
    )


def _glass_blur(x: Tensor, parameters: tuple[float, int], generator: Generator) -> Tensor:
    """Blur, move pixels by up to one to the left and up, and blur again.

    The first two rows and columns stay. In a colour image, a pixel gets the value of its neighbour. In a grey one, half
    of the pixels are swapped with it, so that a value may go further. That is what the generators do: in numpy, an
    exchange of two pixels of three values copies one of them.
    """
    sigma, rounds = parameters
    x = _gaussian_blur(x, sigma)
    b, c, h, w = x.shape
    image = torch.arange(b)
    for _ in range(rounds):
        up, left = torch.randint(-1, 1, (2, b, h - 2, w - 2), generator=generator)
        if c == 3:
            row, column = torch.arange(2, h)[:, None] + up, torch.arange(2, w) + left
            x[:, :, 2:, 2:] = x.permute(0, 2, 3, 1)[image[:, None, None], row, column].permute(0, 3, 1, 2)
            continue
        swapped = torch.randint(0, 2, up.shape, generator=generator)
        up, left = up * swapped, left * swapped
        for row in range(h - 1, 1, -1):
            for column in range(w - 1, 1, -1):
                pixel = image, 0, row + up[:, row - 2, column - 2], column + left[:, row - 2, column - 2]
                other = x[pixel]
                x[pixel] = x[:, 0, row, column].clone()
                x[:, 0, row, column] = other
    return _gaussian_blur(x, sigma)


def _zoom_blur(x: Tensor, largest: float, generator: Generator) -> Tensor:
    """The mean of the image and of its enlargements by 1, 1.01, … up to the largest (excluded)."""
    factors = torch.arange(1, largest - 1e-6, 0.01)
    none = torch.zeros(x.shape[0])
    total = x.clone()
    for factor in factors:
        total += warp(x, affine_matrices(none, none, none + factor, none + factor))
    return total / (len(factors) + 1)


def _plasma(count: int, side: int, decay: float, generator: Generator) -> Tensor:
    """Diamond-square noise in 0..1, periodic, [count, side, side].

    Args:
        count: number of maps.
        side: a power of 2.
        decay: the square root of the factor by which the amplitude falls where the distance of the points halves.
        generator: random numbers.
    """
    field = torch.zeros(count, side, side)
    step, amplitude = side, 1.0
    while step >= 2:
        half = step // 2
        corners = field[:, ::step, ::step]

        def around(total: Tensor, amplitude: float = amplitude) -> Tensor:
            return total / 4 + _uniform(tuple(total.shape), -amplitude, amplitude, generator)

        below = corners + corners.roll(-1, 1)
        middles = around(below + below.roll(-1, 2))
        field[:, half::step, half::step] = middles
        field[:, ::step, half::step] = around(middles + middles.roll(1, 1) + corners + corners.roll(-1, 2))
        field[:, half::step, ::step] = around(middles + middles.roll(1, 2) + below)
        step, amplitude = half, amplitude / decay**2
    field -= field.amin((1, 2), keepdim=True)
    return field / field.amax((1, 2), keepdim=True)


def _fog(x: Tensor, parameters: tuple[float, float], generator: Generator) -> Tensor:
    strength, decay = parameters
    b, _, h, w = x.shape
    side = 2 ** math.ceil(math.log2(max(h, w)))
    brightest = x.amax((1, 2, 3), keepdim=True)
    haze = _plasma(b, side, decay, generator)[:, None, :h, :w]
    return (x + strength * haze) * brightest / (brightest + strength)


def _brightness(x: Tensor, added: float, generator: Generator) -> Tensor:
    """Add to the value of HSV; hue and saturation stay."""
    value = x.amax(1, keepdim=True)
    brighter = (value + added).clamp(max=1)
    return torch.where(value > 0, x / value.clamp_min(1e-6) * brighter, brighter)


def _contrast(x: Tensor, factor: float, generator: Generator) -> Tensor:
    mean = x.mean((2, 3), keepdim=True)
    return (x - mean) * factor + mean


def _sampled(x: Tensor, places: Tensor) -> Tensor:
    """Bilinear values at pixel coordinates (x, y) [b, h, w, 2], reflected at the middle of the edge pixels."""
    h, w = x.shape[2:]
    grid = places * torch.tensor([2 / (w - 1), 2 / (h - 1)]) - 1
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=True)


def _elastic(x: Tensor, parameters: tuple[float, float, float], generator: Generator) -> Tensor:
    """Move three points at random, the image affinely with them; then shift pixels by smoothed noise.

    Args:
        x: the images.
        parameters: amplitude and standard deviation of the smoothed noise, largest movement of a point, in sides.
        generator: random numbers.
    """
    b, _, h, w = x.shape
    side = min(h, w)
    amplitude, smooth, reach = (side * value for value in parameters)
    middle, third = side // 2, side // 3
    points = torch.tensor(
        [[middle + third] * 2, [middle + third, middle - third], [middle - third] * 2]
    ).float()
    moved = points + _uniform((b, 3, 2), -reach, reach, generator)
    row, column = torch.meshgrid(torch.arange(h).float(), torch.arange(w).float(), indexing="ij")
    ones = torch.ones(b, 3, 1)
    back = torch.linalg.solve(
        torch.cat([moved, ones], 2), points.expand(b, 3, 2)
    )  # [b, 3, 2]: from moved to original
    target = torch.stack([column, row, torch.ones(h, w)], -1).view(1, h * w, 3)
    x = _sampled(x, (target @ back).view(b, h, w, 2))
    noise = _uniform((b, 2, h, w), -1, 1, generator)
    shift = amplitude * _gaussian_blur(noise, smooth, mode="reflect", truncate=3.0)
    return _sampled(x, torch.stack([column, row], -1) + shift.permute(0, 2, 3, 1))


def _each(x: Tensor, change: Callable[[Image.Image], Image.Image]) -> Tensor:
    """Change every image by Pillow."""
    done = [np.asarray(change(Image.fromarray(pixels))) for pixels in _bytes(x).permute(0, 2, 3, 1).numpy()]
    return torch.from_numpy(np.stack(done)).permute(0, 3, 1, 2).float() / 255


def _bytes(x: Tensor) -> Tensor:
    return (x * 255).round_().clamp_(0, 255).to(torch.uint8)


def _pixelate(x: Tensor, factor: float, generator: Generator) -> Tensor:
    def change(image: Image.Image) -> Image.Image:
        small = image.resize((int(image.width * factor), int(image.height * factor)), Image.Resampling.BOX)
        return small.resize(image.size, Image.Resampling.BOX)

    return _each(x, change)


def _jpeg(x: Tensor, quality: int, generator: Generator) -> Tensor:
    def change(image: Image.Image) -> Image.Image:
        encoded = io.BytesIO()
        image.save(encoded, "JPEG", quality=quality)
        return Image.open(encoded)

    return _each(x, change)


def _affine(degrees: float = 0.0, shear: float = 0.0, scale: float = 1.0) -> Any:
    """A corruption by an affine map about the middle, in a random direction; black where there is no source."""

    def apply(x: Tensor, parameters: None, generator: Generator) -> Tensor:
        sign = _sign(x.shape[0], generator)
        factor = torch.full_like(sign, scale)
        return warp(x, affine_matrices(sign * degrees, sign * shear, factor, factor))

    return apply


def _translate(x: Tensor, pixels: int, generator: Generator) -> Tensor:
    """Shift by this many pixels on both axes, each in a random direction."""
    down, across = (pixels * (1 + _sign(x.shape[0], generator)).long() for _ in range(2))
    return crop(x, down, across, (x.shape[2], x.shape[3]), pixels)


def _stripe(x: Tensor, edge: int, generator: Generator) -> Tensor:
    """Invert what lies left and right of a vertical stripe in the middle, ``edge`` columns each."""
    column = torch.arange(x.shape[3])
    return torch.where((column < edge) | (column >= x.shape[3] - edge), 1 - x, x)


def _line(x: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """Brightness of a line of some 3 pixels' width from left to right, [b, 1, h, w].

    Args:
        x: images [b, c, h, w].
        start, end: coordinates (x, y) [b, 2].
    """
    h, w = x.shape[2:]
    row, column = torch.arange(h).float()[:, None], torch.arange(w).float()
    (x0, y0), (x1, y1) = (point[:, :, None, None].unbind(1) for point in (start, end))  # each [b, 1, 1]
    height = y0 + (y1 - y0) / (x1 - x0) * (column - x0)
    bright = (torch.log(1 - (row - height).abs().clamp(max=2.29) / 2.3) + 1).clamp(0, 1)
    inside = (column >= x0.floor()) & (column < x1.ceil())
    return (bright * inside)[:, None]


def _dotted_line(x: Tensor, dot: int, generator: Generator) -> Tensor:
    """A line across the image, of which every other ``dot`` columns are drawn."""
    b, _, h, w = x.shape
    heights = torch.randint(0, h - 1, (2, b), generator=generator).float()
    left, right = torch.zeros(b), torch.full((b,), w - 1.0)
    line = _line(x, torch.stack([left, heights[0]], 1), torch.stack([right, heights[1]], 1))
    drawn = torch.arange(w) // dot % 2 == 1
    return x + line * drawn


def _zigzag(x: Tensor, size: float, generator: Generator) -> Tensor:
    """A zigzag across the image: its corners are ``size`` above and below a line, 2 x ``size`` apart."""
    b, _, h, w = x.shape
    start = torch.randint(0, h - 1, (b,), generator=generator).float()
    slope = torch.randint(-5, 5, (b,), generator=generator) / (w - 5)
    length = (w - 5) * (1 + slope**2).sqrt()
    along = torch.arange(size, w - 5, 2 * size)
    side = size * (1 - 2 * (torch.arange(len(along)) % 2))
    places = [torch.zeros(b, 2)]
    places += [torch.tensor([a, s]).expand(b, 2) for a, s in zip(along.tolist(), side.tolist(), strict=True)]
    places.append(torch.stack([length, torch.zeros(b)], 1))
    cos, sin = 1 / (1 + slope**2).sqrt(), slope / (1 + slope**2).sqrt()
    corners = [
        torch.stack([2 + cos * a - sin * s, start + sin * a + cos * s], 1)
        for a, s in (p.unbind(1) for p in places)
    ]
    for first, second in zip(corners, corners[1:], strict=False):
        x = (x + _line(x, first, second)).clamp(0, 1)
    return x


#: For colour images of 32x32: five severities each, with the parameters of CIFAR-10-C.
CIFAR_C: dict[str, Corruption] = {
    "gaussian noise": Corruption("noise", _gaussian_noise, (0.04, 0.06, 0.08, 0.09, 0.10)),
    "shot noise": Corruption("noise", _shot_noise, (500, 250, 100, 75, 50)),
    "impulse noise": Corruption("noise", _impulse_noise, (0.01, 0.02, 0.03, 0.05, 0.07)),
    "defocus blur": Corruption(
        "blur", _defocus_blur, ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))
    ),
    "glass blur": Corruption("blur", _glass_blur, ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2))),
    "zoom blur": Corruption("blur", _zoom_blur, (1.06, 1.11, 1.16, 1.21, 1.26)),
    "fog": Corruption("weather", _fog, ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))),
    "brightness": Corruption("weather", _brightness, (0.05, 0.1, 0.15, 0.2, 0.3)),
    "contrast": Corruption("digital", _contrast, (0.75, 0.5, 0.4, 0.3, 0.15)),
    "elastic": Corruption(
        "digital",
        _elastic,
        ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
    ),
    "pixelate": Corruption("digital", _pixelate, (0.95, 0.9, 0.85, 0.75, 0.65)),
    "jpeg": Corruption("digital", _jpeg, (80, 65, 58, 50, 40)),
}

#: For grey images of 28x28: one severity each, with the parameters of MNIST-C.
MNIST_C: dict[str, Corruption] = {
    "shot noise": Corruption("noise", _shot_noise, (3,)),
    "impulse noise": Corruption("noise", _impulse_noise, (0.17,)),
    "glass blur": Corruption("blur", _glass_blur, ((0.7, 2),)),
    "shear": Corruption("affine", _affine(shear=0.4), (None,)),
    "scale": Corruption("affine", _affine(scale=0.7), (None,)),
    "rotate": Corruption("affine", _affine(degrees=math.degrees(0.4)), (None,)),
    "translate": Corruption("affine", _translate, (3,)),
    "brightness": Corruption("weather", _brightness, (0.5,)),
    "fog": Corruption("weather", _fog, ((3, 1.4),)),
    "stripe": Corruption("drawn", _stripe, (7,)),
    "dotted line": Corruption("drawn", _dotted_line, (2,)),
    "zigzag": Corruption("drawn", _zigzag, (2.0,)),
}

#: By the images' channels, rows and columns.
CORRUPTIONS: Mapping[tuple[int, ...], Mapping[str, Corruption]] = {(3, 32, 32): CIFAR_C, (1, 28, 28): MNIST_C}


def corruption_set(target: EvalTarget) -> Mapping[str, Corruption]:
    """The corruptions that are defined for the images; raises ``CapszooError`` if none are."""
    target.require_one_view("corruptions are measured")
    size = tuple(target.images.spec.input_size)
    if size in CORRUPTIONS:
        return CORRUPTIONS[size]
    raise CapszooError(
        f"corruptions are defined for 3x32x32 and 1x28x28 images, {target.name} takes {'x'.join(map(str, size))}",
        "leave --corruptions out",
    )


def corrupt(pixels: Tensor, corruption: Corruption, severity: int, generator: Generator) -> Tensor:
    """Corrupt uint8 images [b, c, h, w] to the same shape.

    Args:
        pixels: the images.
        corruption: what is done to them.
        severity: from 1, the weakest.
        generator: random numbers, on the CPU.
    """
    parameters = corruption.severities[severity - 1]
    return _bytes(corruption.apply(pixels.cpu().float() / 255, parameters, generator)).to(pixels.device)


@torch.no_grad()
def corruptions(
    target: EvalTarget,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[CorruptionResult, ...]:
    """Accuracy on every corruption and severity.

    Args:
        target: the model and its images; see ``corruption_set``.
        seed: of the corruptions' random numbers.
        batch_size: images per forward pass; None: the target's.
        progress: called with the number of images after each block of them.
    """
    chosen, spec = corruption_set(target), target.images.spec
    size = batch_size or target.batch_size
    right = {name: [0] * len(corruption.severities) for name, corruption in chosen.items()}
    for number, batch in enumerate(target.batches(BLOCK, progress)):
        for name, corruption in chosen.items():
            for severity in range(1, len(corruption.severities) + 1):
                generator = keyed_generator(seed, name, severity, number)
                changed = corrupt(batch.pixels, corruption, severity, generator)
                scores = torch.cat([target.net(target.normalised(part)) for part in changed.split(size)])
                hits = all_right(scores, batch.labels, spec.labels_per_image, target.threshold)
                right[name][severity - 1] += int(hits.sum())
    return tuple(
        CorruptionResult(name, corruption.group, tuple(100 * count / target.n for count in right[name]))
        for name, corruption in chosen.items()
    )
