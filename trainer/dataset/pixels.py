"""Decode image files to upright sRGB pixels, and crop samples to their buckets."""

from __future__ import annotations

import importlib
import math
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
from trainer.protocol.reading import UnusableFileError, noting_file, open_file

if TYPE_CHECKING:  # decoder processes start faster without its imports
    from trainer.dataset.sampling import Sample

SUFFIXES = frozenset(
    {".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".avif", ".jxl"}
)
"""Lowercase extensions of image files."""

# Only these: some of Pillow's other readers are unsafe, such as the one that starts Ghostscript, even for a .png name.
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF", "AVIF", "JXL")
# Exceptions that Pillow's readers are known to raise for broken and malicious files.
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
    """Pixels of an upright image: colors (mode RGB, sRGB) and opacity (mode L; None if fully opaque)."""

    colors: Image.Image
    alpha: Image.Image | None
    profile: Literal["none", "good", "broken"]
    """State of the embedded color profile; if it is broken, the colors are treated as sRGB."""

    def on(self, background: str) -> Image.Image:
        """Return the colors composited on a background color such as #ffffff."""
        if self.alpha is None:
            return self.colors
        return Image.composite(self.colors, Image.new("RGB", self.colors.size, background), self.alpha)


with suppress(ImportError):  # JPEG XL needs this plugin, which registers itself with Pillow if it is installed.
    importlib.import_module("pillow_jxl")


class _PillowLimitsOff:
    """Context that turns off Pillow's process-wide pixel limit and warnings while any image is being read.

    The limit cannot be set per image, and exceeding it may only cause a warning; our own check is stricter. The
    warnings are about odd metadata; problems that matter become findings. Both are restored after the last image.
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


_pillow_limits_off = _PillowLimitsOff()


def load_formats() -> None:
    """Load Pillow's 40 format modules now (60 ms), not when the first image is opened."""
    Image.init()


@contextmanager
def open_image(path: Path, max_megapixels: float) -> Iterator[ImageFile.ImageFile]:
    """Open an image at its first frame, reading only the header; errors in the block become DatasetError too.

    Raises DatasetError if the file is missing, not readable, empty, not an image, damaged or too large; the size is
    checked before any pixel is decoded.
    """
    with noting_file(path), faults_named(path), _pillow_limits_off:
        load_formats()
        formats = [name for name in _FORMATS if name in Image.OPEN]
        with open_file(path, "image") as file, Image.open(file, formats=formats) as image:
            check_megapixels(path, image.width, image.height, max_megapixels)
            yield image


def check_megapixels(path: Path, width: int, height: int, max_megapixels: float) -> None:
    """Raise DatasetError if an image has more pixels than allowed."""
    megapixels = width * height / 1e6
    if megapixels > max_megapixels:
        size = {"width": width, "height": height, "megapixels": megapixels, "limit": max_megapixels}
        raise file_fault("image.too_large", path, **size)


@contextmanager
def faults_named(path: Path) -> Iterator[None]:
    """Convert errors that an image file causes in the block to a DatasetError that names the file."""
    try:
        yield
    except FileNotFoundError as fault:
        raise file_fault("image.missing", path) from fault
    except UnusableFileError as fault:
        raise file_fault("image.unusable", path, reason=fault.reason) from fault
    except PermissionError as fault:
        raise file_fault("image.forbidden", path) from fault
    except UnidentifiedImageError as fault:
        raise file_fault(_unidentified(path), path) from fault
    except _FAULTS as fault:
        reason = " ".join(str(fault).split()) or type(fault).__name__
        raise file_fault("image.damaged", path, reason=reason) from fault


def _unidentified(path: Path) -> str:
    """Return the code of the problem with a file that no decoder recognizes."""
    if path.stat().st_size == 0:
        return "image.empty"
    is_jpeg_xl = path.suffix.lower() == ".jxl" and "JXL" not in Image.OPEN
    return "image.jpeg_xl" if is_jpeg_xl else "image.unreadable"


def exif_orientation(image: ImageFile.ImageFile) -> int:
    """Return the EXIF orientation (1 to 8) of an undecoded image; 1 if it is missing or invalid."""
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except _FAULTS:  # broken EXIF data does not make the pixels unusable
        return 1
    return value if value in _TURNS else 1


def upright_size(image: ImageFile.ImageFile) -> tuple[int, int]:
    """Return the (width, height) in pixels of the upright image; decodes PNG, whose EXIF may be at the end."""
    width, height = image.size
    return (height, width) if _orientation_left(image) >= 5 else (width, height)


def _orientation_left(image: ImageFile.ImageFile) -> int:
    # Pillow (TIFF) and libjxl (JPEG XL) rotate while decoding; the size of such images is already upright.
    return 1 if image.format in ("TIFF", "JXL") else exif_orientation(image)


def load_upright(path: Path, background: str, max_megapixels: float) -> Image.Image:
    """Return the image as upright 8-bit sRGB (mode RGB): first frame, composited on the background color.

    Raises DatasetError like `open_image`.
    """
    return _load_layers(path, max_megapixels).on(background)


def crop_pixels(
    sample: Sample, background: str, max_megapixels: float
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32] | None]:
    """Return a sample's sRGB pixels (height, width, 3) in bucket size, and its mask (height, width; 0 to 1) or None.

    The window is resampled to the bucket in one pass (Lanczos, with a prefilter when shrinking), or in two if the
    sample is turned; pixels and mask are turned and mirrored as drawn for the sample. Raises DatasetError like
    `open_image`.
    """
    image = sample.image
    layers = _load_layers(image.path, max_megapixels)
    pixels = np.asarray(_jittered(_crop_colors(layers.on(background), sample), sample))
    mask = layers.alpha if image.mask == "alpha" else None
    if image.mask == "file" and image.mask_path is not None:
        mask = load_upright(image.mask_path, "#000000", max_megapixels).convert("L")
    if mask is None:
        return pixels, None
    return pixels, np.asarray(_crop_mask(mask, sample), np.float32) / np.float32(255)


def _crop_colors(image: Image.Image, sample: Sample) -> Image.Image:
    left, top, width, height = sample.window
    if sample.image.crop is not None:
        # Resampling reads a few pixels beyond the window, as if the whole image had been scaled. Cut the crop out
        # first, so that nothing the artist cropped away bleeds in.
        x, y, wide, high = sample.image.region()
        with _pillow_limits_off:
            image = image.crop((x, y, x + wide, y + high))
        left, top = left - x, top - y
    return _to_bucket(image, (left, top, left + width, top + height), sample, Image.Resampling.LANCZOS)


def _crop_mask(mask: Image.Image, sample: Sample) -> Image.Image:
    # A mask file may differ in size from its image, so the window is scaled to it. Resample by area: Lanczos overshoots
    # at the hard edges of masks.
    across, down = mask.width / sample.image.width, mask.height / sample.image.height
    left, top, width, height = sample.window
    right, bottom = min((left + width) * across, mask.width), min((top + height) * down, mask.height)
    return _to_bucket(mask, (left * across, top * down, right, bottom), sample, Image.Resampling.BOX)


def _to_bucket(
    image: Image.Image, box: tuple[float, float, float, float], sample: Sample, how: Image.Resampling
) -> Image.Image:
    image = _turned(image, box, sample, how) if sample.angle else image.resize(sample.image.bucket, how, box)
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if sample.flip else image


def _turned(
    image: Image.Image, box: tuple[float, float, float, float], sample: Sample, how: Image.Resampling
) -> Image.Image:
    """Return the box turned around its center and enlarged until no corner lies outside it, in bucket size.

    It is first scaled so that turning neither shrinks nor enlarges it, because only scaling has a prefilter.
    """
    width, height = sample.image.bucket
    zoom, turn = sample.zoom, math.radians(sample.angle)
    whole, cosine, sine = (math.ceil(width / zoom), math.ceil(height / zoom)), math.cos(turn), math.sin(turn)
    # For each pixel of the result, where it is in the scaled box; both are measured from their centers.
    matrix = (
        *(cosine, -sine, (whole[0] - cosine * width + sine * height) / 2),
        *(sine, cosine, (whole[1] - sine * width - cosine * height) / 2),
    )
    smooth = Image.Resampling.BILINEAR if how == Image.Resampling.BOX else Image.Resampling.BICUBIC
    return image.resize(whole, how, box).transform((width, height), Image.Transform.AFFINE, matrix, smooth)


def _jittered(image: Image.Image, sample: Sample) -> Image.Image:
    """Return the image with the sample's hue shift or gamma."""
    if sample.hue:
        hue, saturation, value = image.convert("HSV").split()
        shifted = [round(level + sample.hue * 256 / 360) % 256 for level in range(256)]
        image = Image.merge("HSV", (hue.point(shifted), saturation, value)).convert("RGB")
    if sample.gamma != 1.0:
        image = image.point([round(255 * (level / 255) ** sample.gamma) for level in range(256)] * 3)
    return image


def _load_layers(path: Path, max_megapixels: float) -> Layers:
    with open_image(path, max_megapixels) as image:
        return decode(image)


def decode(image: ImageFile.ImageFile) -> Layers:
    """Return the pixels of an opened image; call this inside `open_image`, which converts errors."""
    image.load()
    turn = _TURNS.get(_orientation_left(image))
    upright = image.transpose(turn) if turn is not None else image
    colors, alpha = _split_alpha(_to_eight_bits(upright))
    data = image.info.get("icc_profile")
    if colors.mode == "LAB":
        data = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    transform = _transform_to_srgb(data, colors.mode) if data else None
    if transform is None:
        return Layers(colors.convert("RGB"), alpha, "broken" if data else "none")
    return Layers(transform.apply(colors), alpha, "good")


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """Convert grayscale of more than 8 bits to mode L by scaling; Pillow's conversion clips bright values to white.

    Pillow already reads 16-bit color as 8-bit RGB. Raises ValueError for values outside 0 to 65,535 (mode F: 0 to 1).
    """
    if not image.mode.startswith(("I", "F")):
        return image
    values = np.asarray(image, np.float32)
    largest = 1.0 if image.mode == "F" else 65535.0
    if not (values.size and np.isfinite(values).all() and values.min() >= 0.0 and values.max() <= largest):
        raise ValueError(f"its brightness values are not between 0 and {largest:g}")
    gray = Image.fromarray(np.rint(values * np.float32(255.0 / largest)).astype(np.uint8))
    key = image.info.get("transparency")
    if key is not None:
        gray.putalpha(Image.fromarray(np.where(values == key, 0, 255).astype(np.uint8)))
    return gray


def _split_alpha(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Return the colors (mode L, RGB, CMYK or LAB) and the opacity (None if the whole image is opaque)."""
    alpha = None
    if image.has_transparency_data:
        full = image.convert("RGBA")
        alpha = full.getchannel("A")
        gray = image.mode in ("1", "L", "LA", "La")
        image = full.convert("RGB").getchannel("R") if gray else full.convert("RGB")
        if alpha.getextrema() == (255, 255):
            alpha = None
    if image.mode == "1":
        image = image.convert("L")
    return (image if image.mode in _PROFILE_MODES else image.convert("RGB")), alpha


def _transform_to_srgb(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Return the conversion from an embedded profile to sRGB; None if broken or meant for another mode."""
    # Profiles are created per image: lcms does not guarantee that threads may share one.
    try:
        source = ImageCms.ImageCmsProfile(BytesIO(profile))
        return ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, "RGB")
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return None
