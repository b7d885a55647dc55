"""Read captions from .txt and .caption files and from metadata.jsonl, without ever writing them."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainer.protocol.reading import UnusableFileError, open_file, parse_json, read_text, reason_of

SUFFIXES = (".txt", ".caption")
"""Extensions of caption files; if an image has both files, the first is used."""
SOURCES = (*SUFFIXES, "metadata")
"""Places of captions, if a job does not set its own."""
METADATA_NAME = "metadata.jsonl"
COLUMNS = ("text", "prompt", "caption")
"""Columns of a metadata file that may contain the caption; the first one present is used."""

LARGEST = 100_000
"""Maximum bytes of a caption file; a larger file is not a caption and would only fill memory."""

_MOST_FAULTS = 20
"""Maximum number of invalid lines listed per file; if there are thousands, they have the same cause."""

Lines = Literal["caption", "variants"]


class NotACaptionError(Exception):
    """A caption file cannot be used; the error's text is the reason."""


@dataclass(frozen=True, slots=True)
class CaptionFile:
    """Text and detected encoding of a caption file."""

    text: str
    encoding: Literal["utf-8", "utf-16", "cp1252"]


def read_caption_file(path: Path) -> CaptionFile:
    """Return a caption file's text without a byte order mark; raises NotACaptionError.

    Text that is not UTF-8 is decoded as UTF-16 if it has a byte order mark, else as Windows cp1252, where the five
    undefined bytes become the replacement character. The file is not changed.
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
    """Return a caption file's alternative captions: all lines joined, or one per line; none if the text is empty."""
    kept = [line.strip() for line in text.splitlines() if line.strip()]
    if lines == "variants":
        return tuple(kept)
    return (" ".join(kept),) if kept else ()


def read_metadata(path: Path) -> tuple[dict[str, str], list[str]]:
    """Return the captions in Hugging Face's metadata.jsonl by `file_name`, and the reasons why lines are not used.

    `file_name` is relative to the file's folder. Up to 20 reasons are listed with their line numbers; all valid lines
    are used. A missing file has no captions.
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
    """Raise ValueError for a caption above the size limit of caption files; `name` is its key in the file."""
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
