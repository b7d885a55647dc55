"""Readable validation errors: the dotted key, the reason, and the nearest valid name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from trainer.config.field_names import keys_called, related, unsupported, value_called
from trainer.config.schema import (
    BrokenRulesError,
    Section,
    choices,
    fields,
    kind_name,
    nearest,
    sections_in,
    values_text,
)
from trainer.errors import JobError
from trainer.protocol.text import printable

_MOST_FAULTS = 30
_LONGEST_FAULT = 1000
_LONGEST_HINT = 60
_Section = TypeVar("_Section", bound=Section)


@dataclass(frozen=True, slots=True)
class _SchemaPlace:
    """Place in the schema at which an error occurred: its dotted key, and the field or tables there."""

    key: str
    annotation: Any
    field: FieldInfo | None
    tables: Sequence[type[Section]]


def problems(error: ValidationError, root: type[Section]) -> tuple[str, ...]:
    """Return a "key: reason" line for every error found when validating ``root``, in schema order."""
    found: dict[str, str] = {}
    for detail in error.errors(include_url=False):
        for key, reason in _reasons(detail, root):
            # pydantic also reports a list whose items are all invalid as too short; don't report it twice.
            if detail["type"] != "too_short" or not any(inner.startswith(f"{key}.") for inner in found):
                found.setdefault(key, reason)
    return tuple(f"{key}: {reason}" for key, reason in found.items())


def validated(root: type[_Section], data: Mapping[str, Any], code: str, source: str, remedy: str) -> _Section:
    """Return `data` validated as a `root` table; raises JobError listing every error in the file `source`."""
    try:
        return root.model_validate(data)
    except ValidationError as error:
        faults = problems(error, root)
        raise JobError(code, faults_sentence(source, faults), remedy, faults) from None


def faults_sentence(source: str, faults: Sequence[str]) -> str:
    """Return all errors in a file as text, one per line."""
    if len(faults) == 1:
        return f"{source}: {printable(faults[0], _LONGEST_FAULT)}"
    shown = [printable(fault, _LONGEST_FAULT) for fault in faults[:_MOST_FAULTS]]
    if len(faults) > _MOST_FAULTS:
        shown.append(f"and {len(faults) - _MOST_FAULTS:,} more")
    return f"{source} has {len(faults):,} problems:" + "".join(f"\n  {fault}" for fault in shown)


def unknown_key(word: str, parent: str, table: Sequence[type[Section]], root: type[Section]) -> str:
    """Return the message for an unknown key: a suggestion, advice on an unsupported setting, or the valid keys."""
    if other := _other_name(word, parent, root):
        difference = related(word)
        return f"unknown key (did you mean {other}?{f' {difference}' if difference else ''})"
    if advice := unsupported(word):
        return f"unknown key: {advice}"
    names = [field.alias or name for section in table for name, field in section.model_fields.items()]
    near = nearest(word, names)
    if near is not None:
        return f"unknown key (did you mean {near}?)"
    elsewhere = [found.key for found in fields(root) if found.key.rpartition(".")[2] == word and "[" not in found.key]
    if elsewhere:  # a setting of the whole job, if there is one, not that of one folder
        return f"unknown key in this table (did you mean {min(elsewhere, key=lambda key: '*' in key)}?)"
    place = f"[{parent}]" if parent else f"a {root.__name__.lower()}"
    return f"unknown key; valid keys of {place} are {', '.join(dict.fromkeys(names))}"


def _other_name(word: str, parent: str, root: type[Section]) -> str | None:
    """Return Impasto's key for a setting that another program calls `word`, or None if there is none.

    A key in the table `parent` is returned without the table's name.
    """
    existing = {re.sub(r"\[\w+\]", "", found.key) for found in fields(root)}
    where = re.sub(r"\.\d+(?=\.|$)", ".*", parent)
    keys = sorted(
        (key for key in keys_called(word) if key in existing), key=lambda key: not key.startswith(f"{where}.")
    )
    if not keys:
        return None
    table, _, name = keys[0].rpartition(".")
    if table == where:
        return name if name != word else None  # an argument of another optimizer
    return f"{name} in [[{table[:-2]}]]" if table.endswith(".*") else keys[0]


def _reasons(detail: ErrorDetails, root: type[Section]) -> Iterator[tuple[str, str]]:
    if detail["type"] == "extra_forbidden":
        table, word = _place(detail["loc"][:-1], root), str(detail["loc"][-1])
        yield _join(table.key, _bare(word)), unknown_key(word, table.key, table.tables, root)
        return
    place = _place(detail["loc"], root)
    broken = detail.get("ctx", {}).get("error")
    if isinstance(broken, BrokenRulesError):
        yield from ((_join(place.key, key), reason) for key, reason in broken.problems)
    elif detail["type"] == "missing":
        doc = place.field.description if place.field is not None else None
        yield place.key, "is missing" + (f": {doc[:1].lower()}{doc[1:].rstrip('.')}" if doc else "")
    elif detail["type"] == "union_tag_invalid":
        yield f"{place.key}.name", _bad_choice(f"{place.key}.name", detail["input"]["name"], choices(place.annotation))
    elif detail["type"] == "string_too_long":
        most = detail["ctx"]["max_length"]
        yield place.key, f"has {len(detail['input']):,} characters; at most {most:,} are allowed"
    else:
        yield place.key, _bad_value(place, detail["input"])


def _place(loc: Sequence[str | int], root: type[Section]) -> _SchemaPlace:
    """Return the place in the schema at pydantic's location ``loc``, without its labels for union members."""
    key: list[str] = []
    annotation: Any = root
    field: FieldInfo | None = None
    tables: Sequence[type[Section]] = [root]
    for step in loc:
        if isinstance(step, int):
            key.append(str(step))
            annotation, field = _item(annotation), None
            continue
        kinds = [table for table in tables if len(tables) > 1 and kind_name(table) == step]
        if kinds:
            tables = kinds
            continue
        known = _field(tables, step)
        if known is None:
            break
        key.append(step)
        field, annotation = known, known.annotation
        tables = sections_in(annotation)
    return _SchemaPlace(".".join(key), annotation, field, tables)


def _join(table: str, key: str) -> str:
    return f"{table}.{key}" if table else key


def _bare(key: str) -> str:
    """Return a key in TOML notation: in quotes unless it has only letters, digits, - and _."""
    return key if re.fullmatch(r"[\w-]+", key) else json.dumps(key, ensure_ascii=False)


def _field(tables: Sequence[type[Section]], key: str) -> FieldInfo | None:
    for table in tables:
        for name, field in table.model_fields.items():
            if (field.alias or name) == key:
                return field
    return None


def _item(annotation: Any) -> Any:
    return next((part for part in get_args(annotation) if part is not type(None)), annotation)


def _bad_value(place: _SchemaPlace, value: Any) -> str:
    words = choices(place.annotation)
    if isinstance(value, str) and words and not place.tables:
        wanted = f"must be {values_text(place.annotation, place.field)}, not {_shown(value)}"
        return wanted + _meant(place.key, value, words)
    return f"must be {values_text(place.annotation, place.field)}, not {_shown(value)}{_hint(place, value)}"


def _bad_choice(key: str, value: Any, words: list[str]) -> str:
    meant = _meant(key, value, words) if isinstance(value, str) else ""
    return f"must be one of {', '.join(words)}, not {_shown(value)}{meant}"


def _meant(key: str, value: str, words: Sequence[str]) -> str:
    """Return a hint for an invalid choice, based on its name in other programs or its spelling; "" if there is none."""
    near = value_called(key, value) or (None if unsupported(value) else nearest(value, words))
    if near in words:
        return f" (did you mean {near}?)"
    advice = unsupported(value)
    return f"; {advice}" if advice else ""


def _hint(place: _SchemaPlace, value: Any) -> str:
    wanted = values_text(place.annotation, place.field)
    if isinstance(value, str) and len(value) > _LONGEST_HINT:
        return ""
    if isinstance(value, str) and "number" in wanted and value.replace(".", "", 1).replace("e-", "", 1).isdigit():
        return f" (write {value} without quotes)"
    if isinstance(value, str) and value.lower() in ("true", "false", "yes", "no", "on", "off") and "true or" in wanted:
        return " (write true or false without quotes)"
    if isinstance(value, float) and value.is_integer() and "whole number" in wanted:
        return f" (write {int(value)})"
    return ""


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        text = printable(value, 60)
        return f'the text "{text}"' if text else "an empty text"
    if isinstance(value, list | tuple):
        return f"the list {json.dumps(value, default=str, ensure_ascii=False)[:60]}"
    if isinstance(value, dict):
        return "a table"
    return str(value)[:60]
