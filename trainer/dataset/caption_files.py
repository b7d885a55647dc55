"""Reading of captions from .txt and .caption files and metadata.jsonl; nothing here writes."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainer.protocol.reading import UnusableFileError, open_file, parse_json, read_text, reason_of

SUFFIXES = (".txt", ".caption")
"""Extensions of caption files; the first wins where an image has both."""
METADATA_NAME = "metadata.jsonl"
COLUMNS = ("text", "prompt", "caption")
"""Columns of a metadata file that may contain the caption; the first one present wins."""

LARGEST = 100_000
"""Maximum bytes of a caption file; a larger file is something else and would only fill memory."""

_MOST_FAULTS = 20
"""Maximum invalid lines of one file that are listed: a hundred thousand of them are one mistake."""

Lines = Literal["caption", "variants"]


class NotACaptionError(Exception):
    """Error for a caption file that cannot be used; its text is the reason."""


@dataclass(frozen=True, slots=True)
class CaptionFile:
    """Text and detected encoding of a caption file."""

    text: str
    encoding: Literal["utf-8", "utf-16", "cp1252"]


def read_caption_file(path: Path) -> CaptionFile:
    """Return a caption file's text without a byte order mark; raises NotACaptionError.

    Other encodings than UTF-8 are read so that the text can be shown and used, but the file is left unchanged: UTF-16
    if it has a byte order mark, else Windows cp1252, with the replacement character for its five undefined bytes.
    """
    try:
        with open_file(path, "stream") as file:
            data = file.read(LARGEST + 1)
    except (OSError, UnusableFileError) as fault:
        raise NotACaptionError(f"it cannot be read ({reason_of(fault)})") from fault
    return decode_caption(data)


def decode_caption(data: bytes) -> CaptionFile:
    """Decode the bytes of a caption file as `read_caption_file` does; raises NotACaptionError."""
    if len(data) > LARGEST:
        raise NotACaptionError(f"it is longer than {LARGEST:,} bytes")
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return CaptionFile(data.decode("utf-16", errors="replace"), "utf-16")
    if b"\0" in data:
        raise NotACaptionError("it is not a text file")
    try:
        return CaptionFile(data.decode("utf-8-sig"), "utf-8")
    except UnicodeDecodeError:
        return CaptionFile(data.decode("cp1252", errors="replace"), "cp1252")


def split_caption(text: str, lines: Lines) -> tuple[str, ...]:
    """Return the alternative captions of a text: all lines joined, or one per line; none if it is empty."""
    kept = [line.strip() for line in text.splitlines() if line.strip()]
    if lines == "variants":
        return tuple(kept)
    return (" ".join(kept),) if kept else ()


def read_metadata(path: Path) -> tuple[dict[str, str], list[str]]:
    """Read Hugging Face's metadata.jsonl: captions by `file_name` (relative to its folder), and its faults.

    Up to 20 faults are listed with their lines; the other lines are still used. A missing file has no captions.
    """
    captions: dict[str, str] = {}
    faults: list[str] = []
    more = 0
    try:
        lines = read_text(path, "notes").split("\n")
    except FileNotFoundError:
        return {}, []
    except (OSError, UnusableFileError) as fault:
        return {}, [f"it cannot be read ({reason_of(fault)})"]
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                name, caption = _metadata_line(line)
                captions[name] = caption
            except ValueError as fault:
                if len(faults) < _MOST_FAULTS:
                    faults.append(f"line {number}: {reason_of(fault)}")
                else:
                    more += 1
    return captions, [*faults, f"{more:,} more lines cannot be used"] if more else faults


def require_short(name: str, text: str) -> None:
    """Raise ValueError for a caption above the limit of caption files; `name` is its name in the file."""
    if len(text) > LARGEST:
        raise ValueError(f"its {name} is longer than {LARGEST:,} characters")


def _metadata_line(line: str) -> tuple[str, str]:
    facts = parse_json(line)
    if not isinstance(facts, dict) or not isinstance(facts.get("file_name"), str):
        raise ValueError("it has no file_name")
    column = next((column for column in COLUMNS if facts.get(column) is not None), None)
    if column is None:
        raise ValueError(f"it has no caption (one of {', '.join(COLUMNS)})")
    if not isinstance(facts[column], str):
        raise ValueError(f"its {column} is not text")
    require_short(column, facts[column])
    # JSON can contain single surrogates, which no text encoder accepts.
    if any("\ud800" <= letter <= "\udfff" for letter in facts[column]):
        raise ValueError(f"its {column} contains an invalid character (U+D800 to U+DFFF)")
    return facts["file_name"].replace("\\", "/").removeprefix("./"), facts[column]
