"""Reads what little of YAML other tools write their folders in; SwarmUI's .fds files look the same.

Nested tables of texts, comments, quotes and blocks of lines (| and >) are read; lists, anchors, tags and tables within
braces are passed over, so nothing in such a file can run or grow. A whole YAML library would be a dependency for this.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import islice
from typing import Union

Table = Mapping[str, Union[str, "Table"]]

_ENTRY = re.compile(r"(?P<key>\"[^\"]*\"|'[^']*'|[^\s#'\"\-][^:]*?)\s*:(?:\s+(?P<value>.*))?")
_BLOCK = re.compile(r"(?P<style>[|>])[-+0-9]*")
_COMMENT = re.compile(r"\s+#.*$")
_DEEPEST = 8


def read_table(text: str) -> Table:
    """Return the outermost table of a text; lines that mean nothing here are passed over."""
    lines = [line.rstrip().expandtabs(4) for line in text.lstrip("\ufeff").splitlines()]
    return _table(lines, [0], 0, 0)


def _table(lines: list[str], place: list[int], indent: int, depth: int) -> dict[str, str | Table]:
    """Read the entries that stand at `indent`, from line `place[0]` on, which is moved past them."""
    found: dict[str, str | Table] = {}
    while place[0] < len(lines):
        line = lines[place[0]]
        here = _indent(line)
        if _says_nothing(line):
            place[0] += 1
            continue
        if here < indent:
            break
        place[0] += 1
        entry = _ENTRY.fullmatch(line.strip())
        if here > indent or not entry:
            continue
        found[_plain(entry["key"])] = _value(lines, place, entry["value"] or "", here, depth)
    return found


def _value(lines: list[str], place: list[int], written: str, indent: int, depth: int) -> str | Table:
    """Return what stands behind a colon, or in the deeper lines below it."""
    if block := _BLOCK.fullmatch(_COMMENT.sub("", written)):
        return _block(lines, place, indent, folded=block["style"] == ">")
    if written and not written.startswith("#"):
        return _plain(written)
    following = next((line for line in islice(lines, place[0], None) if not _says_nothing(line)), "")
    if _indent(following) > indent and depth < _DEEPEST:
        return _table(lines, place, _indent(following), depth + 1)
    return ""


def _block(lines: list[str], place: list[int], indent: int, *, folded: bool) -> str:
    """Return the deeper lines as one text; folded ones end only where an empty line follows."""
    taken: list[str] = []
    while place[0] < len(lines) and (not lines[place[0]] or _indent(lines[place[0]]) > indent):
        taken.append(lines[place[0]].strip())
        place[0] += 1
    if not folded:
        return "\n".join(taken)
    paragraphs = "\n".join(taken).split("\n\n")
    return "\n".join(" ".join(paragraph.split("\n")) for paragraph in paragraphs)


def _plain(written: str) -> str:
    if written[:1] == "'" and (end := written.find("'", 1)) > 0:
        return written[1:end]
    if written[:1] == '"' and (end := written.find('"', 1)) > 0:
        return written[1:end].replace("\\\\", "\\")
    return _COMMENT.sub("", written).strip()


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _says_nothing(line: str) -> bool:
    return not line.strip() or line.lstrip().startswith("#")
