"""A job's values as they stand in its file: nested tables, reached by dotted keys, and written as TOML."""

from __future__ import annotations

import copy
import datetime
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from trainer.config.job import Job
from trainer.config.paths import make_absolute
from trainer.config.resolve import flat
from trainer.config.schema import fields
from trainer.config.write import toml_value

Values = dict[str, Any]

_HEADING = "# A job for Impasto: python -m trainer train THIS_FILE\n"


def value_at(values: Mapping[str, Any] | list[Any], key: str) -> Any:
    """Return what stands at a dotted key, places in lists counted from 0; None where nothing does."""
    place: Any = values
    for step in key.split("."):
        if isinstance(place, list):
            place = place[int(step)] if step.isdigit() and int(step) < len(place) else None
        else:
            place = place.get(step) if isinstance(place, Mapping) else None
    return place


def put(values: Values, key: str, value: Any) -> None:
    """Set a dotted key, in place; tables on the way are made, a single value in the way gives way.

    Raises KeyError for a place in a list that is not there.
    """
    *tables, last = key.split(".")
    place: Any = values
    for step in tables:
        inner = value_at(place, step)
        if not isinstance(inner, dict | list):
            inner = {}
            _set(place, step, inner)
        place = inner
    _set(place, last, value)


def drop(values: Values, key: str) -> None:
    """Take a dotted key out, in place, with the tables that it leaves empty; a key that is not there is passed over."""
    table, _, last = key.rpartition(".")
    place = value_at(values, table) if table else values
    if isinstance(place, dict):
        place.pop(last, None)
    elif isinstance(place, list) and last.isdigit() and int(last) < len(place):
        del place[int(last)]
    if table and not place:
        drop(values, table)


def changed_keys(before: Values, after: Values) -> frozenset[str]:
    """Return every dotted key whose value is another one, or which only one of the two has."""
    old, new = dict(flat(before, "")), dict(flat(after, ""))
    missing = object()
    return frozenset(key for key in {*old, *new} if old.get(key, missing) != new.get(key, missing))


def with_absolute_paths(values: Mapping[str, Any], folder: Path) -> Values:
    """Return the values of a job in `folder` as a file elsewhere holds them; runs stay beside the file."""
    moved = copy.deepcopy(dict(values))
    stated = value_at(values, "output.runs")
    make_absolute(moved, folder)
    if stated is None:
        drop(moved, "output.runs")
    return moved


def to_toml(values: Mapping[str, Any]) -> str:
    """Return the text of the job file, keys in the order of the schema; what is no job's key comes after them."""
    return _HEADING + "\n".join(_lines(values, "")).rstrip() + "\n"


def _set(place: Any, step: str, value: Any) -> None:
    if isinstance(place, list):
        if not step.isdigit() or int(step) >= len(place):
            raise KeyError(step)
        place[int(step)] = value
    else:
        place[step] = value


def _lines(table: Mapping[str, Any], path: str) -> Iterator[str]:
    """First a table's own keys, then the tables in it, as TOML demands."""
    names = sorted(table, key=lambda name: _order().get(f"{path}{name}", len(_order())))
    yield from (f"{_bare(name)} = {_value(table[name])}" for name in names if not _is_table(table[name]))
    for name in filter(lambda name: _is_table(table[name]), names):
        many = isinstance(table[name], list)
        for item in table[name] if many else (table[name],):
            key = path + _bare(name)
            yield f"\n[[{key}]]" if many else f"\n[{key}]"
            yield from _lines(item, f"{key}.")


def _is_table(value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    return bool(items) and all(isinstance(item, dict) for item in items)


def _value(value: Any) -> str:
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_bare(key)} = {_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return toml_value(value)


def _bare(key: str) -> str:
    """A key as TOML writes it: in quotes unless it is made of plain letters, digits, - and _."""
    plain = key.isascii() and key.replace("-", "").replace("_", "").isalnum()
    return key if plain else toml_value(key)


@lru_cache(maxsize=1)
def _order() -> Mapping[str, int]:
    """The place of each key in the schema, without the places in lists and the kinds of optimizers."""
    return {re.sub(r"\.\*|\[.*?\]", "", found.key): number for number, found in enumerate(fields(Job))}
