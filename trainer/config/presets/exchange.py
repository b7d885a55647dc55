"""Read untrusted presets: size limits are checked before parsing, and all errors are reported at once."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainer.config.presets.preset import SCHEMA, Preset, dump_preset, text_faults
from trainer.config.presets.preview_image import decode_image, image_fault
from trainer.config.problems import faults_sentence, problems
from trainer.config.toml_file import FileKind, parse_toml, read_text
from trainer.errors import JobError
from trainer.files.header import PRESET_KEY
from trainer.protocol.files import long_path, write_bytes
from trainer.protocol.reading import noting_file, open_file
from trainer.protocol.records import renamed
from trainer.protocol.text import printable

REMEDY = "Ask the author for a valid file, or fix this yourself; `python -m trainer presets share` writes preset files."
PRESET_FILE = FileKind(
    word="preset",
    largest=512 * 1024,
    limit="512 KiB",
    remedy=REMEDY,
    wrong_file="Use the preset's own .toml file; to make a preset from a LoRA, use `presets share FILE --out x.toml`.",
    missing="Check the path; `python -m trainer presets list` shows your presets.",
)

# Parsing time grows with the square of a dotted key's length, and each unknown key costs a search for a suggestion.
# A preset with every key has 170 of them, takes 3 KiB without strings and nests 3 deep; its longest key has 4 parts.
_MOST_SYNTAX = 12 * 1024
_MOST_KEYS = 300
_DEEPEST = 8
_LONGEST_FAULT = 400
_MOST_FAULTS = 30

# A string or comment, closed or not. It matches wherever one starts, so scanning is linear.
_TEXT_OR_COMMENT = re.compile(
    r'"""(?:\\.|[^\\])*?(?:"""|\Z)'
    r"|'''.*?(?:'''|\Z)"
    r'|"(?:\\[^\n]|[^"\\\n])*+"?'
    r"|'[^'\n]*+'?"
    r"|\#[^\n]*+",
    re.DOTALL,
)
_LARGEST_IMAGE = 8 << 20  # bytes; our own files take 0.5 MB
_FENCE = re.compile(r"```[\w-]*\n(.*?)```", re.DOTALL)


def load_preset(path: Path) -> Preset:
    """Read the preset file at ``path``.

    Raises JobError, whose ``problems`` list every error, if the file is unreadable, too large, not UTF-8, not TOML, too
    deeply nested or a job file, if it has a newer schema, or if it contains keys, values, texts or images that are not
    allowed.
    """
    with noting_file(path):
        return parse_preset(read_text(path, PRESET_FILE), path.name)


def parse_preset(text: str, source: str) -> Preset:
    """Parse TOML ``text`` as a Preset; ``source`` names it in errors. Raises JobError as ``load_preset`` does."""
    source = printable(source, 120)
    _require_modest(text, source)
    data = parse_toml(text, source, PRESET_FILE)
    _require_modest_values(data, source)
    _require_known_schema(data, source)
    if data.get("schema") == 1 and data["schema"] is not True:
        data = renamed(data) | {"schema": SCHEMA}
    faults = [*text_faults(data), *_image_faults(data)]
    try:
        preset = Preset.model_validate(data)
    except ValidationError as error:
        faults += [fault for fault in problems(error, Preset) if not _is_reported(fault, faults)]
    if faults:
        shown = tuple(printable(fault, _LONGEST_FAULT) for fault in faults[:_MOST_FAULTS])
        more = f"\n  and {len(faults) - _MOST_FAULTS:,} more" if len(faults) > _MOST_FAULTS else ""
        raise JobError("preset.invalid", faults_sentence(source, shown) + more, REMEDY, shown)
    return preset


def _require_modest(text: str, source: str) -> None:
    """Raise JobError if ``text``, apart from strings and comments, is so long or nested that parsing would be slow."""
    syntax = _TEXT_OR_COMMENT.sub("_", text)
    if len(re.sub(r"\s+", "", syntax)) > _MOST_SYNTAX or syntax.count("=") > _MOST_KEYS:
        raise JobError("preset.large", f"{source} has too many keys and values for a preset.", REMEDY)
    depth = deepest = 0
    for bracket in re.findall(r"[][{}]", syntax):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    parts = max(line.count(".") for line in re.split(r"[\n=]", syntax))
    if max(deepest, parts) > _DEEPEST:
        raise _too_deep(source)


def _require_modest_values(data: Mapping[str, Any], source: str) -> None:
    """Raise JobError for deeply nested tables in any notation, and for integers of more than 64 bits."""
    level: list[Any] = [data]
    for _ in range(_DEEPEST):
        items = [item for value in level for item in (value.values() if isinstance(value, dict) else value)]
        if any(isinstance(item, int) and item.bit_length() > 64 for item in items):
            # Printing them takes Python time quadratic in their length.
            raise JobError("preset.number", f"{source} contains a number of more than 64 bits.", REMEDY)
        level = [item for item in items if isinstance(item, dict | list)]
    if level:
        raise _too_deep(source)


def _too_deep(source: str) -> JobError:
    return JobError("preset.deep", f"{source} nests tables or lists too deeply for a preset.", REMEDY)


def _require_known_schema(data: Mapping[str, Any], source: str) -> None:
    """Raise JobError if the data is a job, or a preset written by a newer version of Impasto."""
    if "dataset" in data:  # checked before the schema: jobs have their own schema numbers
        raise JobError(
            "preset.job",
            f"{source} is a job, not a preset: it contains paths from one computer.",
            f"Make a preset from it: python -m trainer presets share {source} --out my-preset.toml",
        )
    version = data.get("schema")
    if isinstance(version, int) and version > SCHEMA:
        raise JobError(
            "preset.newer",
            f"{source} was written by a newer Impasto (preset schema {version}); this version reads up to {SCHEMA}.",
            "Update Impasto with `python run.py update`, or ask for the preset in an older format.",
        )


def _image_faults(data: Mapping[str, Any]) -> list[str]:
    preview = data.get("preview")
    image = preview.get("image") if isinstance(preview, dict) else None
    reason = image_fault(image) if isinstance(image, str) else None
    return [f"preview.image: {reason}"] if reason else []


def _is_reported(fault: str, faults: list[str]) -> bool:
    """Return whether ``faults`` already contains an error for the same key as ``fault``."""
    return any(former.startswith(fault.partition(": ")[0] + ": ") for former in faults)


def preset_text(preset: Preset) -> str:
    """Return the text of a preset file without the preview image, to paste into a chat."""
    return dump_preset(preset.replaced(preview=None))


def read_pasted(text: str, source: str) -> Preset:
    """Parse a preset pasted from a chat, which may have added ``` or changed line endings and spaces.

    Raises JobError as ``load_preset`` does.
    """
    _require_size(text, source)
    plain = text.replace("\r\n", "\n").replace("\u00a0", " ").lstrip("\ufeff")
    fenced = _FENCE.search(plain)
    return parse_preset(fenced[1] if fenced else plain, source)


def save_as_image(preset: Preset, path: Path) -> None:
    """Write a PNG of the preset's preview image with the preset file embedded.

    Raises JobError for a preset without a preview image, and OSError if the file cannot be written.
    """
    from PIL import Image, PngImagePlugin

    if preset.preview is None:
        raise JobError(
            "preset.no_image",
            f'"{preset.name}" has no preview image.',
            "Add one first, or save the preset as a file.",
        )
    held = PngImagePlugin.PngInfo()
    held.add_itxt(PRESET_KEY, dump_preset(preset), zip=False)
    buffer = BytesIO()
    with Image.open(BytesIO(decode_image(preset.preview.image))) as image:
        image.convert("RGB").save(buffer, "PNG", pnginfo=held, optimize=True)
    write_bytes(path, buffer.getvalue())


def load_preset_or_image(path: Path) -> Preset:
    """Read a preset from a preset file or from an image that contains one; raises JobError as ``load_preset`` does."""
    return _from_image(path) if path.suffix.lower() == ".png" else load_preset(path)


def _from_image(path: Path) -> Preset:
    from PIL import Image

    try:
        if long_path(path).stat().st_size > _LARGEST_IMAGE:
            raise _no_preset(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # size warnings: no pixel is decoded
            with open_file(path, "image") as file, Image.open(file, formats=("PNG",)) as image:
                text = image.info.get(PRESET_KEY)
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
        f"{path.name} is an image without a preset.",
        "Programs that re-save images remove the preset: ask for the original file, or for the preset as .toml.",
    )
