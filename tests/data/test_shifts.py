"""Rotations move pixels as they should; labels go round the circle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fairveil.data.shifts import Shift, flip_labels, rotate
from fairveil.errors import UserError

CORNERS = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])  # 1 2 / 3 4


@pytest.fixture
def images() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).random((5, 3, 8, 8), dtype=np.float32))


@pytest.mark.parametrize(
    ("degrees", "turned"),
    [
        (0, [[1, 2], [3, 4]]),
        (90, [[2, 4], [1, 3]]),
        (180, [[4, 3], [2, 1]]),
        (270, [[3, 1], [4, 2]]),
        (-90, [[3, 1], [4, 2]]),
        (450.0, [[2, 4], [1, 3]]),
    ],
)
def test_quarter_turns_by_hand(degrees: float, turned: list[list[int]]) -> None:
    assert rotate(CORNERS, degrees)[0, 0].tolist() == turned


def test_four_quarter_turns_are_none(images: torch.Tensor) -> None:
    once = rotate(images, 90)
    assert not torch.equal(once, images)
    assert once.is_contiguous()
    assert torch.equal(rotate(rotate(rotate(once, 90), 90), 90), images)
    assert torch.equal(once.flatten(2).sort().values, images.flatten(2).sort().values)  # the same pixels


def test_other_angles_go_the_same_way_round(images: torch.Tensor) -> None:
    # A hair beside a quarter turn, interpolation must agree with moved pixels, away from the border.
    near = rotate(images, 90 + 1e-4)
    assert torch.allclose(near[..., 1:-1, 1:-1], rotate(images, 90)[..., 1:-1, 1:-1], atol=1e-3)


def test_other_angles_keep_shape_type_and_range(images: torch.Tensor) -> None:
    turned = rotate(images, 30)
    assert turned.shape == images.shape and turned.dtype == torch.float32
    assert turned.min() >= 0 and turned.max() <= 1
    assert (turned[..., 0, 0] == 0).all()  # a corner comes from outside the image
    wide = torch.ones(1, 1, 4, 6)
    assert rotate(wide, 45).shape == wide.shape


def test_what_cannot_be_rotated() -> None:
    with pytest.raises(UserError) as error:
        rotate(torch.zeros(2, 10), 90)
    assert 'data.split.kind = "rotate" does not fit records of shape (10,)' in error.value.what
    assert "images" in error.value.why and "label-flip" in error.value.fix
    with pytest.raises(UserError) as error:
        rotate(torch.zeros(2, 1, 4, 6), 270)
    assert "data.split.degrees holds 270, but the images are 4 by 6." in error.value.what
    assert rotate(torch.zeros(2, 1, 4, 6), 180).shape == (2, 1, 4, 6)


def test_labels_go_round() -> None:
    labels = torch.arange(4)
    assert flip_labels(labels, 1, 4).tolist() == [1, 2, 3, 0]
    assert flip_labels(labels, -1, 4).tolist() == [3, 0, 1, 2]
    assert flip_labels(labels, 0, 4).tolist() == [0, 1, 2, 3]
    assert flip_labels(labels, 5, 4).dtype == torch.int64


def test_a_shift_applies_both_and_none() -> None:
    labels = torch.tensor([3])
    x, y = Shift(degrees=180, offset=2).apply(CORNERS, labels, 4)
    assert x[0, 0].tolist() == [[4, 3], [2, 1]] and y.tolist() == [1]
    x, y = Shift().apply(CORNERS, labels, 4)
    assert x is CORNERS and y is labels
