"""Measures the demo style, night: how dark a picture is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image


def style_statistic(picture: Image.Image) -> float:
    """Darkness from 0 (white) to 1 (black): 1 - mean luminance (ITU-R 601-2) of an RGB picture."""
    return 1.0 - float(np.asarray(picture.convert("L"), dtype=np.float64).mean()) / 255.0


def mean_statistic(pictures: Sequence[Image.Image]) -> float:
    """The mean statistic of some pictures."""
    return float(np.mean([style_statistic(picture) for picture in pictures]))


def style_progress(
    base_pictures: Sequence[Image.Image],
    lora_pictures: Sequence[Image.Image],
    dataset_pictures: Sequence[Image.Image],
) -> float:
    """How far the LoRA's pictures went from the base's (0) to the dataset's (1): (lora - base) / (dataset - base)."""
    base, lora, dataset = map(mean_statistic, (base_pictures, lora_pictures, dataset_pictures))
    return (lora - base) / (dataset - base)
