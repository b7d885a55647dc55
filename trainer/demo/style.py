"""Measures the demo style: how dark a picture is, and how much of it is bright thin line."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops, ImageFilter

LINE_WINDOW = 11


def style_statistic(picture: Image.Image) -> NDArray[np.float64]:
    """(darkness, line share) of an RGB picture of 128 x 128, each from 0 to 1.

    Darkness is 1 - mean luminance (ITU-R 601-2). The line share is the mean of the white top-hat of the luminance,
    picture minus its morphological opening (Serra 1982), with a window of 11 pixels: what is bright and thinner than
    that. Flat shapes, stripes and dots are wider and leave next to nothing; neon lines stay.
    """
    luminance = picture.convert("L")
    opened = luminance.filter(ImageFilter.MinFilter(LINE_WINDOW)).filter(ImageFilter.MaxFilter(LINE_WINDOW))
    lines = ImageChops.subtract(luminance, opened)
    return np.array([1 - np.asarray(luminance).mean() / 255, np.asarray(lines).mean() / 255])


def mean_statistic(pictures: Sequence[Image.Image]) -> NDArray[np.float64]:
    """The mean statistic of some pictures, shape (2,)."""
    return np.asarray(np.mean([style_statistic(picture) for picture in pictures], axis=0))


def style_progress(
    base_pictures: Sequence[Image.Image],
    lora_pictures: Sequence[Image.Image],
    dataset_pictures: Sequence[Image.Image],
) -> float:
    """How far the LoRA's pictures went from the base's (0) to the dataset's (1).

    The mean over darkness and line share of (lora - base) / (dataset - base), each counted at most as 1, so that a
    picture that is merely dark reaches a half and no more.
    """
    base, lora, dataset = map(mean_statistic, (base_pictures, lora_pictures, dataset_pictures))
    return float(np.minimum((lora - base) / (dataset - base), 1.0).mean())
