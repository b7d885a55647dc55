"""Sets single keys of a job from the command line: ``--set recipe.rank=32``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.config.recipe import LENGTH_KEYS
from trainer.protocol.reading import UnusableFileError, parse_toml

Data = dict[str, Any]


def apply_overrides(data: Data, overrides: Sequence[str]) -> list[str]:
    """Set each ``key=value`` in ``data``, in order, and return what could not be set, one sentence each.

    Places in lists are counted from 0 (``dataset.folders.0.repeats=3``). Whether a key exists and suits its value is
    left to validation, which then names it. A length of the run replaces the length that the file states.
    """
    faults = []
    for text in overrides:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")):
            faults.append(f"--set {text}: must be written key=value, such as recipe.rank=32")
        elif reason := _set(data, key.split("."), _value(value.strip())):
            faults.append(f"{key}: {reason}")
    return faults


def _value(text: str) -> Any:
    """Read a TOML value; a bare word is text, so that no quotes need to survive the shell."""
    try:
        data = parse_toml(f"value = {text}", finite=False)
    except UnusableFileError:
        return text
    return data["value"] if len(data) == 1 else text


def _set(data: Data, steps: list[str], value: Any) -> str | None:
    """Put ``value`` in its place, making the tables on the way; the reason when there is no such place."""
    place: Any = data
    for number, step in enumerate(steps[:-1]):
        if isinstance(place, dict):
            place = place.setdefault(step, {})
        elif isinstance(place, list):
            if not _index(step, place):
                return _no_item(".".join(steps[:number]), place)
            place = place[int(step)]
        else:
            return f"{'.'.join(steps[:number])} is a single value and has no keys of its own"
    return _put(place, steps, value)


def _put(place: Any, steps: list[str], value: Any) -> str | None:
    *parents, last = steps
    if isinstance(place, dict):
        if parents == ["recipe"] and last in LENGTH_KEYS:
            for other in LENGTH_KEYS:
                place.pop(other, None)
        place[last] = value
        return None
    if isinstance(place, list):
        if not _index(last, place):
            return _no_item(".".join(parents), place)
        place[int(last)] = value
        return None
    return f"{'.'.join(parents)} is a single value and has no keys of its own"


def _index(step: str, items: list[Any]) -> bool:
    return step.isascii() and step.isdigit() and int(step) < len(items)


def _no_item(key: str, items: list[Any]) -> str:
    return f"there is no such item; {key} has {len(items)}, counted from 0"
