"""The keys of the query language: what each asks for, in words for the help and in examples for completion."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

Kind = Literal["text", "number", "flag", "choice"]


@dataclass(frozen=True, slots=True)
class Key:
    """One key: the kind of value it takes, what it asks for, an example, and which changes can alter its answer."""

    name: str
    kind: Kind
    sentence: str
    example: str
    depends: frozenset[str] = frozenset()
    choices: tuple[str, ...] = ()
    whole: bool = True
    """Whether its numbers are whole ones."""
    most: float = inf
    """The greatest number that there can be."""


def _key(name: str, kind: Kind, sentence: str, example: str, depends: str = "", **more: object) -> Key:
    return Key(name, kind, sentence, example, frozenset(depends.split()), **more)  # type: ignore[arg-type]


_OF_ALL = "caption rating crop mask size file problem inspection"
MISSING = ("caption", "rating", "crop", "mask", "size")

KEYS: dict[str, Key] = {
    key.name: key
    for key in (
        _key("tag", "text", "has this tag; * stands for any text, ? for one character", "tag:red*", "caption file"),
        _key("caption", "text", "the caption contains this text", 'caption:"red hat"', "caption file"),
        _key("name", "text", "the file name contains this text", "name:portrait"),
        _key("folder", "text", "a folder on its way contains this text", "folder:closeups"),
        _key("path", "text", "folder and file name together contain this text", "path:cats/img"),
        _key("size", "number", "pixels of the shorter side", "size:<512", "size file"),
        _key("width", "number", "pixels from left to right", "width:>=1024", "size file"),
        _key("height", "number", "pixels from top to bottom", "height:>=1024", "size file"),
        _key("ratio", "number", "width by height; 1 is square", "ratio:>1.5", "size file", whole=False),
        _key("tags", "number", "how many different tags", "tags:>30", "caption file"),
        _key("chars", "number", "characters of the caption", "chars:>200", "caption file"),
        _key("tokens", "number", "CLIP tokens of the caption", "tokens:>75", "caption file"),
        _key("rating", "number", "how many stars", "rating:>=3", "rating", most=5),
        _key(
            "missing",
            "choice",
            "lacks a caption, or rating, crop, mask, size",
            "missing:caption",
            _OF_ALL,
            choices=MISSING,
        ),
        _key(
            "problem",
            "text",
            "has a problem; or one whose words contain this",
            "problem:",
            _OF_ALL,
        ),
        _key("dup", "flag", "there is another picture that is the same or nearly", "dup:", "inspection file"),
        _key("mask", "flag", "has a mask", "mask:", "mask file"),
        _key("crop", "flag", "has a crop of its own", "crop:", "crop"),
        _key("excluded", "flag", "is left out of training", "excluded:", "excluded"),
    )
}

OPTIONAL = frozenset({"problem"})
"""Keys of texts that also ask something without one."""
