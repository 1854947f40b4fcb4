"""Shifts between clients: what makes one group's data unlike another's. Pure functions of arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fairveil.errors import UserError


def check_rotatable(features: tuple[int, ...], degrees: float) -> None:
    """Raise unless records of this shape can be rotated and keep their shape."""
    if len(features) != 3:
        raise UserError(
            f'data.split.kind = "rotate" does not fit records of shape {features}.',
            "Only images, of shape (channels, height, width), can be rotated: a turned table has no meaning.",
            'data.split.kind = "iid" or "label-flip"',
        )
    if degrees % 180 == 90 and features[1] != features[2]:
        raise UserError(
            f"data.split.degrees holds {degrees:g}, but the images are {features[1]} by {features[2]}.",
            "A quarter turn swaps height and width, so clients would hold records of different shapes.",
            "data.split.degrees = [0, 180]",
        )


def rotate(x: Tensor, degrees: float) -> Tensor:
    """Images turned counter-clockwise about their centre.

    Multiples of 90 degrees move pixels and change none. Other angles interpolate linearly (which keeps values
    in their range, unlike splines), with 0 where nothing was.

    Args:
        x: (n, channels, height, width) float32.
        degrees: any angle.

    Returns:
        The same shape; `x` itself for whole turns.
    """
    check_rotatable(tuple(x.shape[1:]), degrees)
    if degrees % 360 == 0:
        return x
    if degrees % 90 == 0:
        return torch.rot90(x, int(degrees // 90) % 4, dims=(-2, -1)).contiguous()
    from scipy import ndimage  # slow to import, and seldom needed

    turned = ndimage.rotate(x.numpy(), degrees, axes=(-1, -2), reshape=False, order=1)  # 0 outside
    return torch.from_numpy(np.ascontiguousarray(turned))


def flip_labels(y: Tensor, offset: int, classes: int) -> Tensor:
    """Labels moved on by `offset`, round the circle of classes; (n,) int64."""
    return (y + offset) % classes


@dataclass(frozen=True)
class Shift:
    """What sets one group's records apart: images turned, labels moved on. The default changes nothing."""

    degrees: float = 0
    offset: int = 0

    def apply(self, x: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        """The shifted records, of the same shapes."""
        if self.degrees:
            x = rotate(x, self.degrees)
        if self.offset:
            y = flip_labels(y, self.offset, classes)
        return x, y
