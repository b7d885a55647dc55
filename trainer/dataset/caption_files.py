"""Reads captions from .txt and .caption files and from metadata.jsonl; never writes."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainer.protocol.reading import UnusableFileError, open_file, parse_json, read_text, reason_of

SUFFIXES = (".txt", ".caption")
"""Endings of caption files; the first wins where a picture has both."""
METADATA_NAME = "metadata.jsonl"
COLUMNS = ("text", "prompt", "caption")
"""Columns of a metadata file that hold the caption; the first that is there wins."""

LARGEST = 100_000
"""Bytes; longer than any caption. A larger file is something else, and would only fill the memory."""

_MOST_FAULTS = 20
"""How many bad lines of one file are named: a hundred thousand of them are one mistake."""

Lines = Literal["caption", "variants"]


class NotACaptionError(Exception):
    """A caption file that cannot be used; its text says why."""


@dataclass(frozen=True, slots=True)
class CaptionFile:
    """What a caption file holds, and in which encoding it turned out to be written (utf-8, utf-16 or cp1252)."""

    text: str
    encoding: Literal["utf-8", "utf-16", "cp1252"]


def read_caption_file(path: Path) -> CaptionFile:
    """Return a caption file's text, any byte order mark removed; raises NotACaptionError.

    Other encodings than UTF-8 are read so that the text can be shown and used, but the file is left as it is: UTF-16
    when its mark says so, else Windows' cp1252, with the replacement character for the five bytes it does not define.
    """
    try:
        with open_file(path, "stream") as file:
            data = file.read(LARGEST + 1)
    except (OSError, UnusableFileError) as fault:
        raise NotACaptionError(f"it cannot be read ({reason_of(fault)})") from fault
    return decode_caption(data)


def decode_caption(data: bytes) -> CaptionFile:
    """Return what the bytes of a caption file say, as `read_caption_file` does; raises NotACaptionError."""
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
    """Return the alternatives that a caption's text holds: all lines as one, or one a line; none when it is empty."""
    kept = [line.strip() for line in text.splitlines() if line.strip()]
    if lines == "variants":
        return tuple(kept)
    return (" ".join(kept),) if kept else ()


def read_metadata(path: Path) -> tuple[dict[str, str], list[str]]:
    """Read Hugging Face's metadata.jsonl: captions by `file_name` (relative to its folder), and what is wrong in it.

    Each fault names its line, up to 20 of them; the other lines are still used. A file that is not there has no
    captions.
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
    """Raise ValueError for a caption, called `name` in its file, that is longer than a caption file may be."""
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
        raise ValueError(f"its {column} is not a text")
    require_short(column, facts[column])
    # JSON can spell halves of surrogate pairs, which no text encoder takes.
    if any("\ud800" <= letter <= "\udfff" for letter in facts[column]):
        raise ValueError(f"its {column} holds half a letter (U+D800 to U+DFFF)")
    return facts["file_name"].replace("\\", "/").removeprefix("./"), facts[column]
