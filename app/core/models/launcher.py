"""Reads the options that a user gave A1111 or Forge, out of webui-user.bat or webui-user.sh, without running it."""

from __future__ import annotations

import re
from collections.abc import Iterator

_ASSIGNMENT = re.compile(r"\s*(?:@?set\s+|export\s+)?\"?(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.IGNORECASE)
_REFERENCE = re.compile(r"%(\w+)%|\$\{(\w+)\}|\$(\w+)")
_OPTION = re.compile(
    r"--(?P<name>ckpt-dirs?|lora-dirs?|models-dir|data-dir|forge-ref-a1111-home)(?:\s+|=)"
    r"(?:\"(?P<double>[^\"]+)\"|'(?P<single>[^']+)'|(?P<bare>[^\s\"']+))"
)


def options_of(script: str) -> Iterator[tuple[str, str]]:
    """Yield those options that name folders, as (name without dashes, value), with the script's variables put in."""
    known: dict[str, str] = {}
    joined = re.sub(r"[ \t]*[\^\\][ \t]*\r?\n", " ", script)  # a line that goes on in the next one
    for line in joined.splitlines():
        if assigned := _ASSIGNMENT.fullmatch(line):  # a remark is none
            known[assigned["name"].upper()] = _REFERENCE.sub(lambda found: _known(known, found), assigned["value"])
    text = known.get("COMMANDLINE_ARGS", "").strip().replace('\\"', "'")
    if text[:1] == text[-1:] and text[:1] in ('"', "'"):
        text = text[1:-1]  # the quotes of the whole assignment
    for option in _OPTION.finditer(text):
        yield option["name"], option["double"] or option["single"] or option["bare"]


def _known(known: dict[str, str], reference: re.Match[str]) -> str:
    name = next(group for group in reference.groups() if group)
    return known.get(name.upper(), reference[0]).strip("\"' ")
