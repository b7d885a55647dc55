"""Image files for tests of the dataset package: photographs of scikit-image, and files that are hard to read."""

from __future__ import annotations

import struct
import zlib
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import skimage
from PIL import Image

from trainer.config.job import DatasetConfig, FolderConfig
from trainer.config.recipe import RecipeConfig
from trainer.dataset.image import ImageRecord

PHOTOS = Path(skimage.__file__).parent / "data"


@cache
def photograph(name: str = "astronaut.png") -> Image.Image:
    """Return a photograph that ships in scikit-image's wheel, as RGB without its profile."""
    with Image.open(PHOTOS / name) as image:
        return Image.fromarray(np.asarray(image.convert("RGB")))


def pixels_of(image: Image.Image) -> npt.NDArray[np.int16]:
    return np.asarray(image).astype(np.int16)


def write_png(path: Path, width: int, height: int, depth: int, color: int, rows: bytes, extra: bytes = b"") -> Path:
    """Write a PNG whose header may say anything: `rows` are the filtered scanlines, `extra` are complete chunks."""
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    body = png_chunk(b"IHDR", header) + extra + png_chunk(b"IDAT", zlib.compress(rows)) + png_chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)
    return path


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def display_p3() -> bytes:
    """Return a minimal ICC matrix profile of Display P3: primaries adapted to D50, gamma 2.2 for all channels."""
    white = (0.9642, 1.0, 0.8249)
    primaries = ((0.51512, 0.24120, -0.00105), (0.29198, 0.69225, 0.04189), (0.15710, 0.06657, 0.78407))

    def xyz(values: tuple[float, ...]) -> bytes:
        return b"XYZ \0\0\0\0" + b"".join(struct.pack(">i", round(value * 65536)) for value in values)

    curve = b"curv\0\0\0\0" + struct.pack(">IH", 1, round(2.2 * 256)) + b"\0\0"
    text = b"desc\0\0\0\0" + struct.pack(">I", 3) + b"P3\0" + bytes(4 + 4 + 2 + 1 + 67)
    tags = [(b"desc", text + bytes(-len(text) % 4)), (b"cprt", b"text\0\0\0\0CC0\0"), (b"wtpt", xyz(white))]
    tags += [(name + b"XYZ", xyz(values)) for name, values in zip((b"r", b"g", b"b"), primaries, strict=True)]
    tags += [(name + b"TRC", curve) for name in (b"r", b"g", b"b")]
    table, data, offset = struct.pack(">I", len(tags)), b"", 128 + 4 + 12 * len(tags)
    for name, value in tags:
        table += name + struct.pack(">II", offset + len(data), len(value))
        data += value
    size = offset + len(data)
    head = struct.pack(">I4sI4s4s4s", size, b"lcms", 0x02100000, b"mntr", b"RGB ", b"XYZ ")
    head += struct.pack(">6H", 2026, 1, 1, 0, 0, 0) + b"acsp" + bytes(28)
    head += b"".join(struct.pack(">i", round(value * 65536)) for value in white)
    return head + bytes(128 - len(head)) + table + data


def picture_at(path: Path) -> Path:
    """Write a photograph of 128 x 128 pixels, with the folders that it needs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    photograph().resize((128, 128)).save(path)
    return path


def folder_config(path: Path, **facts: object) -> FolderConfig:
    """Return a folder of a dataset."""
    return FolderConfig.model_validate({"path": str(path), **facts})


def folder_of(path: Path, **facts: object) -> DatasetConfig:
    """Return a dataset of one folder; keys of the dataset have the prefix "dataset_", the others are the folder's."""
    own = {key: value for key, value in facts.items() if not key.startswith("dataset_")}
    rest = {key.removeprefix("dataset_"): value for key, value in facts.items() if key.startswith("dataset_")}
    return DatasetConfig.model_validate({"folders": (folder_config(path, **own),), **rest})


def recipe_of(resolution: int = 128, **settings: object) -> RecipeConfig:
    return RecipeConfig.model_validate({"resolution": resolution, **settings})


def make_picture(number: int = 0, **facts: object) -> ImageRecord:
    """Return a record without a file, for tests of functions that work on records."""
    usual: dict[str, object] = {
        "id": f"{number:064x}",
        "path": Path(f"{number}.png"),
        "width": 128,
        "height": 128,
        "kind": "train",
        "repeats": 1,
        "weight": 1.0,
        "captions": (f"picture {number}",),
        "trigger": "",
        "class_words": "",
        "mask": "none",
        "mask_path": None,
        "mask_id": None,
        "crop": None,
        "bucket": (128, 128),
    }
    return ImageRecord(**{**usual, **facts})  # type: ignore[arg-type]
