"""Turns a picture file into upright sRGB pixels, and a sample into the crop that is trained on."""

from __future__ import annotations

import importlib
import struct
import threading
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageCms, ImageFile, UnidentifiedImageError

from trainer.dataset.findings import file_fault
from trainer.protocol.reading import UnusableFileError, naming, open_file

if TYPE_CHECKING:  # the processes that look at pictures start faster without what it stands on
    from trainer.dataset.sampling import Sample

SUFFIXES = frozenset(
    {".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".avif", ".jxl"}
)
"""Endings of files that are taken for pictures, in small letters."""

# Only these: Pillow's other readers reach as far as starting Ghostscript for a file that merely calls itself .png.
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF", "AVIF", "JXL")
# What Pillow's readers are known to raise on broken and hostile files.
_FAULTS = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    EOFError,
    RuntimeError,
    MemoryError,
    struct.error,
    zlib.error,
)
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_PROFILE_MODES = ("L", "RGB", "CMYK", "LAB")


@dataclass(frozen=True, slots=True)
class Layers:
    """The pixels of a picture, upright: colours (mode RGB, sRGB), and opacity (mode L), None when all is opaque."""

    colours: Image.Image
    alpha: Image.Image | None
    profile: Literal["none", "good", "broken"]
    """Whether the colours came from an embedded profile; where that was broken they were taken as sRGB."""

    def on(self, background: str) -> Image.Image:
        """Return the colours with a background colour (such as #ffffff) showing through where they are transparent."""
        if self.alpha is None:
            return self.colours
        return Image.composite(self.colours, Image.new("RGB", self.colours.size, background), self.alpha)


with suppress(ImportError):  # JPEG XL needs this plug-in, which registers itself with Pillow when it is there.
    importlib.import_module("pillow_jxl")


class _PillowAside:
    """Puts Pillow's process-wide pixel limit and its warnings aside while at least one picture is being read.

    Our own check is stricter than the limit, which can be neither set per picture nor below a warning; the warnings are
    about odd metadata, and what matters of those becomes a finding. Both are put back when the last reader leaves.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers = 0
        self._limit: int | None = None
        self._warnings = warnings.catch_warnings()

    def __enter__(self) -> None:
        with self._lock:
            if self._readers == 0:
                self._limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
                self._warnings = warnings.catch_warnings()
                self._warnings.__enter__()
                warnings.filterwarnings("ignore", module=r"PIL\.")
            self._readers += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._readers -= 1
            if self._readers == 0:
                self._warnings.__exit__(None, None, None)
                Image.MAX_IMAGE_PIXELS = self._limit


_pillow_aside = _PillowAside()


def load_formats() -> None:
    """Load Pillow's modules for all formats, 40 of them: 60 ms that the first picture would take longer to open."""
    Image.init()


@contextmanager
def open_picture(path: Path, max_megapixels: float) -> Iterator[ImageFile.ImageFile]:
    """Open a picture so far that its header is read, at its first frame; faults while it is used are named as well.

    Raises DatasetError when the file is missing, forbidden, empty, no picture, damaged, or larger than allowed;
    the size is checked before any pixel is decoded.
    """
    with naming(path), faults_named(path), _pillow_aside:
        load_formats()
        formats = [name for name in _FORMATS if name in Image.OPEN]
        with open_file(path, "image") as file, Image.open(file, formats=formats) as image:
            check_megapixels(path, image.width, image.height, max_megapixels)
            yield image


def check_megapixels(path: Path, width: int, height: int, max_megapixels: float) -> None:
    """Raise DatasetError when a picture has more pixels than are allowed."""
    megapixels = width * height / 1e6
    if megapixels > max_megapixels:
        size = {"width": width, "height": height, "megapixels": megapixels, "limit": max_megapixels}
        raise file_fault("picture.too_large", path, **size)


@contextmanager
def faults_named(path: Path) -> Iterator[None]:
    """Turn what goes wrong with a picture's file inside the block into a DatasetError that names it."""
    try:
        yield
    except FileNotFoundError as fault:
        raise file_fault("picture.missing", path) from fault
    except UnusableFileError as fault:
        raise file_fault("picture.unusable", path, reason=fault.reason) from fault
    except PermissionError as fault:
        raise file_fault("picture.forbidden", path) from fault
    except UnidentifiedImageError as fault:
        raise file_fault(_unidentified(path), path) from fault
    except _FAULTS as fault:
        reason = " ".join(str(fault).split()) or type(fault).__name__
        raise file_fault("picture.damaged", path, reason=reason) from fault


def _unidentified(path: Path) -> str:
    """Return the code of the fault of a file that no decoder takes for an image."""
    if path.stat().st_size == 0:
        return "picture.empty"
    is_jpeg_xl = path.suffix.lower() == ".jxl" and "JXL" not in Image.OPEN
    return "picture.jpeg_xl" if is_jpeg_xl else "picture.unreadable"


def exif_orientation(image: ImageFile.ImageFile) -> int:
    """Return the EXIF orientation (1 to 8) of a picture not yet decoded; 1 when there is none or it makes no sense."""
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except _FAULTS:  # broken EXIF data beside good pixels
        return 1
    return value if value in _TURNS else 1


def upright_size(image: ImageFile.ImageFile) -> tuple[int, int]:
    """Return (width, height) in pixels as the picture is meant to be seen; decodes PNG, whose EXIF may come last."""
    width, height = image.size
    return (height, width) if _orientation_left(image) >= 5 else (width, height)


def _orientation_left(image: ImageFile.ImageFile) -> int:
    # Pillow turns TIFF pictures, and libjxl JPEG XL ones, while they are decoded; their size is upright from the start.
    return 1 if image.format in ("TIFF", "JXL") else exif_orientation(image)


def load_upright(path: Path, background: str, max_megapixels: float) -> Image.Image:
    """Return the picture as 8-bit sRGB (mode RGB): upright, first frame, transparency laid on the background colour.

    Raises DatasetError like `open_picture`.
    """
    return _load_layers(path, max_megapixels).on(background)


def crop_pixels(
    sample: Sample, background: str, max_megapixels: float
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32] | None]:
    """Return what the model is shown, in bucket size: sRGB (height, width, 3), and the mask (height, width), 0 to 1.

    The window is resampled to the bucket in one go (Lanczos, with prefilter when it shrinks), both mirrored when the
    sample is. Raises DatasetError like `open_picture`.
    """
    picture = sample.picture
    layers = _load_layers(picture.path, max_megapixels)
    pixels = np.asarray(_crop_colours(layers.on(background), sample))
    mask = layers.alpha if picture.mask == "alpha" else None
    if picture.mask == "file" and picture.mask_path is not None:
        mask = load_upright(picture.mask_path, "#000000", max_megapixels).convert("L")
    if mask is None:
        return pixels, None
    return pixels, np.asarray(_crop_mask(mask, sample), np.float32) / np.float32(255)


def _crop_colours(image: Image.Image, sample: Sample) -> Image.Image:
    left, top, width, height = sample.window
    if sample.picture.crop is not None:
        # The filter reaches a little beyond the window, as if the whole picture had been scaled; but what the artist
        # cut off must not shine in.
        x, y, wide, high = sample.picture.region()
        with _pillow_aside:
            image = image.crop((x, y, x + wide, y + high))
        left, top = left - x, top - y
    return _to_bucket(image, (left, top, left + width, top + height), sample, Image.Resampling.LANCZOS)


def _crop_mask(mask: Image.Image, sample: Sample) -> Image.Image:
    # A mask file may have other dimensions than its picture: the window is taken at the same place of it. Resampled
    # by area, since Lanczos overshoots at the hard edges that masks are made of.
    across, down = mask.width / sample.picture.width, mask.height / sample.picture.height
    left, top, width, height = sample.window
    right, bottom = min((left + width) * across, mask.width), min((top + height) * down, mask.height)
    return _to_bucket(mask, (left * across, top * down, right, bottom), sample, Image.Resampling.BOX)


def _to_bucket(
    image: Image.Image, box: tuple[float, float, float, float], sample: Sample, how: Image.Resampling
) -> Image.Image:
    image = image.resize(sample.picture.bucket, how, box)
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if sample.flip else image


def _load_layers(path: Path, max_megapixels: float) -> Layers:
    with open_picture(path, max_megapixels) as image:
        return decode(image)


def decode(image: ImageFile.ImageFile) -> Layers:
    """Return the pixels of an opened picture; call it inside `open_picture`, which names the faults it meets."""
    image.load()
    turn = _TURNS.get(_orientation_left(image))
    upright = image.transpose(turn) if turn is not None else image
    colours, alpha = _split_alpha(_to_eight_bits(upright))
    data = image.info.get("icc_profile")
    if colours.mode == "LAB":
        data = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    transform = _transform_to_srgb(data, colours.mode) if data else None
    if transform is None:
        return Layers(colours.convert("RGB"), alpha, "broken" if data else "none")
    return Layers(transform.apply(colours), alpha, "good")


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """Bring the modes of more than 8 bits to grey L by their whole range; Pillow's own conversion clips them to white.

    16-bit colour needs nothing: Pillow reads it as 8-bit RGB. Raises ValueError for numbers of no known range.
    """
    if not image.mode.startswith(("I", "F")):
        return image
    values = np.asarray(image, np.float32)
    largest = 1.0 if image.mode == "F" else 65535.0
    if not (values.size and np.isfinite(values).all() and values.min() >= 0.0 and values.max() <= largest):
        raise ValueError(f"its brightness values are not within 0 to {largest:g}")
    grey = Image.fromarray(np.rint(values * np.float32(255.0 / largest)).astype(np.uint8))
    key = image.info.get("transparency")
    if key is not None:
        grey.putalpha(Image.fromarray(np.where(values == key, 0, 255).astype(np.uint8)))
    return grey


def _split_alpha(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Return the colours (mode L, RGB, CMYK or LAB) and the opacity, None when all of the picture is opaque."""
    alpha = None
    if image.has_transparency_data:
        full = image.convert("RGBA")
        alpha = full.getchannel("A")
        grey = image.mode in ("1", "L", "LA", "La")
        image = full.convert("RGB").getchannel("R") if grey else full.convert("RGB")
        if alpha.getextrema() == (255, 255):
            alpha = None
    if image.mode == "1":
        image = image.convert("L")
    return (image if image.mode in _PROFILE_MODES else image.convert("RGB")), alpha


def _transform_to_srgb(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Return the conversion from an embedded profile, None when that is broken or meant for another kind of pixels."""
    # Profiles are made per picture: lcms does not promise that threads may share one.
    try:
        source = ImageCms.ImageCmsProfile(BytesIO(profile))
        return ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, "RGB")
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return None
