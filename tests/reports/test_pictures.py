"""Arrays of any value range become pictures that show what is there."""

from __future__ import annotations

import numpy as np
import pytest

from psgrad.reports.pictures import NONFINITE_COLOUR, thumbnail, to_png, to_rgb


@pytest.mark.parametrize("shape", [(8, 8), (1, 8, 8), (2, 8, 8), (3, 8, 8), (4, 8, 8), (7, 8, 8), (3, 1, 1)])
@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float16, np.float32, np.float64, bool])
def test_any_shape_and_type_is_rgb(shape: tuple[int, ...], dtype: type) -> None:
    picture = to_rgb(np.ones(shape, dtype))
    assert picture.shape == (*shape[-2:], 3)
    assert picture.dtype == np.uint8


def test_bytes_and_fractions_are_taken_as_they_are() -> None:
    assert to_rgb(np.array([[0, 128, 200]], np.uint8))[0, :, 0].tolist() == [0, 128, 200]
    assert to_rgb(np.array([[0.0, 0.5, 0.6]]))[0, :, 0].tolist() == [0, 128, 153]


def test_other_ranges_are_scaled_to_their_own() -> None:
    assert to_rgb(np.array([[-2.0, 0.0, 2.0]]))[0, :, 0].tolist() == [0, 128, 255]
    assert to_rgb(np.array([[0, 8, 16]]))[0, :, 0].tolist() == [0, 128, 255]
    assert to_rgb(np.full((2, 2), 7.0)).tolist() == [[[128] * 3] * 2] * 2


def test_channels_are_red_green_blue() -> None:
    assert to_rgb(np.array([1.0, 0.5, 0.0]).reshape(3, 1, 1)).tolist() == [[[255, 128, 0]]]


def test_pixels_that_are_not_finite_stand_out_and_do_not_spoil_the_others() -> None:
    picture = to_rgb(np.array([[np.nan, np.inf, 0.0, 4.0]]))
    assert picture[0].tolist() == [list(NONFINITE_COLOUR), list(NONFINITE_COLOUR), [0, 0, 0], [255, 255, 255]]
    assert (to_rgb(np.full((2, 2), np.nan)) == NONFINITE_COLOUR).all()


@pytest.mark.parametrize("shape", [(5,), (2, 3, 4, 5), (0, 8, 8), (8, 0)])
def test_what_is_no_image_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="an image has shape"):
        to_rgb(np.zeros(shape))


def test_large_pictures_shrink_and_small_ones_stay() -> None:
    assert thumbnail(np.zeros((300, 600)), 112).size == (112, 56)
    assert thumbnail(np.zeros((1, 5000)), 112).size == (112, 1)
    assert thumbnail(np.zeros((8, 8)), 112).size == (8, 8)
    assert to_png(thumbnail(np.zeros((8, 8)), 112)).startswith(b"\x89PNG")
