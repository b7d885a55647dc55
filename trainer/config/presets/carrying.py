"""How a preset travels: as its file, within a picture that shows what it makes, or as text for a chat."""

from __future__ import annotations

import re
import warnings
from io import BytesIO
from pathlib import Path

from trainer.config.presets.held import PICTURE_KEY
from trainer.config.presets.picture import decode_picture
from trainer.config.presets.preset import Preset
from trainer.config.presets.reading import PRESET_FILE, REMEDY, load_preset, parse_preset
from trainer.config.presets.writing import dump_preset
from trainer.errors import JobError
from trainer.protocol.files import long_path, write_bytes
from trainer.protocol.reading import open_file

_LARGEST_PICTURE = 8 << 20  # bytes; ours have 0.5 MB
_FENCE = re.compile(r"```[\w-]*\n(.*?)```", re.DOTALL)


def preset_text(preset: Preset) -> str:
    """The preset as text for a chat: its file without the picture."""
    return dump_preset(preset.changed(preview=None))


def read_pasted(text: str, source: str) -> Preset:
    """Make a preset of text that came through a chat: between ``` or not, whatever it did to line ends and spaces.

    Raises JobError as ``load_preset`` does.
    """
    _require_size(text, source)
    plain = text.replace("\r\n", "\n").replace("\u00a0", " ").lstrip("\ufeff")
    fenced = _FENCE.search(plain)
    return parse_preset(fenced[1] if fenced else plain, source)


def save_in_picture(preset: Preset, path: Path) -> None:
    """Write a PNG that shows the preset's picture and holds its file.

    Raises JobError for a preset without a picture, OSError when it cannot be written.
    """
    from PIL import Image, PngImagePlugin

    if preset.preview is None:
        raise JobError(
            "preset.no_picture", f'"{preset.name}" has no picture.', "Give it one first, or save it as a file."
        )
    held = PngImagePlugin.PngInfo()
    held.add_itxt(PICTURE_KEY, dump_preset(preset), zip=False)
    buffer = BytesIO()
    with Image.open(BytesIO(decode_picture(preset.preview.picture))) as image:
        image.convert("RGB").save(buffer, "PNG", pnginfo=held, optimize=True)
    write_bytes(path, buffer.getvalue())


def load_carried(path: Path) -> Preset:
    """Read a preset from its own file or from a picture that holds one; raises JobError as ``load_preset`` does."""
    return _of_picture(path) if path.suffix.lower() == ".png" else load_preset(path)


def _of_picture(path: Path) -> Preset:
    from PIL import Image

    try:
        if long_path(path).stat().st_size > _LARGEST_PICTURE:
            raise _no_preset(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of claimed sizes: no pixel is decoded
            with open_file(path, "image") as file, Image.open(file, formats=("PNG",)) as image:
                text = image.info.get(PICTURE_KEY)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        raise _no_preset(path) from None
    if not isinstance(text, str):
        raise _no_preset(path)
    _require_size(text, path.name)
    return parse_preset(str(text), path.name)


def _require_size(text: str, source: str) -> None:
    if len(text.encode("utf-8", "replace")) > PRESET_FILE.largest:
        sentence = f"{source} is larger than {PRESET_FILE.limit}, so it is not a preset."
        raise JobError("preset.large", sentence, REMEDY)


def _no_preset(path: Path) -> JobError:
    return JobError(
        "preset.no_preset",
        f"{path.name} is a picture that holds no preset.",
        "Programs that save a picture anew drop what it holds: ask for the original file, or for the preset as .toml.",
    )
