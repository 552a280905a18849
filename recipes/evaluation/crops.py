"""Several views of each test image, whose scores are averaged: the multi-crop test.

EncapNet's mild and strong settings use this test (Li et al. 2018, appendix C), without specifying the crops. Ours: the
image is resized to the side that training crops from (34 for 32 pixels, 156 for 128, 256 for 224 there). Its four
corners and the middle are cropped, and mirrored too if training mirrored. The scores of all views are averaged. If
the training shifted images instead, they are padded with black by its largest shift and not resized, because a model
that was never trained on resized images is inaccurate on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Crops:
    """Corners and middle of an image.

    Attributes:
        side: rows and columns of the image from which the crops are taken.
        size: rows and columns of a crop.
        flip: also use each crop's mirror image.
        padding: black pixels that are first added on each side, up to ``side``.
    """

    side: int
    size: tuple[int, int]
    flip: bool
    padding: int = 0

    def __len__(self) -> int:
        return 10 if self.flip else 5

    def __str__(self) -> str:
        mirrored = ", each mirrored too" if self.flip else ""
        padded = f" (padded by {self.padding})" if self.padding else ""
        out_of = f"{self.side}x{self.side}{padded}"
        return f"{len(self)} of {self.size[0]}x{self.size[1]} out of {out_of}: corners, middle{mirrored}"

    def views(self, pixels: Tensor) -> Iterator[Tensor]:
        """``[b, c, h, w]``, with the padding of ``side``, to ``len(self)`` times ``[b, c, *size]``."""
        pixels = F.pad(pixels, (self.padding,) * 4)
        height, width = self.size
        down, across = self.side - height, self.side - width
        corners = ((0, 0), (0, across), (down, 0), (down, across), (down // 2, across // 2))
        for top, left in corners:
            view = pixels[:, :, top : top + height, left : left + width]
            yield view
            if self.flip:
                yield view.flip(3)


def default_side(size: int) -> int:
    """Default side to crop from: EncapNet's 34 for 32, in proportion."""
    return round(size * 34 / 32)
