"""Build dataclasses from parsed JSON, checking each field against its annotation.

A status whose step is a text parses well and breaks whatever shows it much later, so the types are checked on reading.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from trainer.protocol.printable import in_json

T = TypeVar("T")

_LAST_MOMENT = 253_370_764_800.0  # the year 9999: later times overflow the calendar of whatever shows them

Check = Callable[[Any], bool]

_NUMBERS: Mapping[Any, tuple[type, ...]] = {float: (int, float), int: (int,)}


def build(kind: type[T], found: Mapping[str, Any], *, null_floats: bool = False) -> T:
    """Return a `kind` made of the keys in `found` that it has; keys of newer versions are skipped.

    Lists are accepted for tuples and, with `null_floats`, null for numbers that were not finite. Raises TypeError for
    a missing field, a value of another type, and a `found` that is not a mapping.
    """
    if not isinstance(found, Mapping):
        raise TypeError("it is not a table of names and values")
    checks = _checks(cast("Any", kind), null_floats)
    fields = {name: found[name] for name in checks if name in found}
    for name, value in fields.items():
        if not checks[name](value):
            raise TypeError(f"{name} is {in_json(value)}")
    needed = (field.name for field in dataclasses.fields(cast("Any", kind)) if _is_needed(field))
    if absent := [name for name in needed if name not in fields]:
        raise TypeError(f"there is no {absent[0]}")
    return kind(**fields)


def moment(value: Any) -> float:
    """Return a Unix time in seconds that a calendar can show; raises ValueError and TypeError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("a time is not a number")
    if not 0 <= value < _LAST_MOMENT:
        raise ValueError(f"{value:g} is not a time")
    return float(value)


def _is_needed(field: dataclasses.Field[Any]) -> bool:
    return field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


@lru_cache(maxsize=256)
def _checks(kind: type, null_floats: bool) -> Mapping[str, Check]:
    hints = get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    return {name: _check(float | None if null_floats and hints[name] is float else hints[name]) for name in names}


def _check(hint: Any) -> Check:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any or hint is object:
        return lambda value: True
    if origin is Literal:
        return lambda value: isinstance(value, str | int | None) and value in inner
    if origin in (Union, types.UnionType):
        parts = [_check(part) for part in inner]
        return lambda value: any(part(value) for part in parts)
    if origin is not None and issubclass(origin, Mapping):
        values = _check(inner[1])
        return lambda value: isinstance(value, Mapping) and all(map(values, value.values()))
    if origin is not None and issubclass(origin, tuple | list):
        return _check_items(inner)
    kinds = _NUMBERS.get(hint, (origin or hint,))
    if bool in kinds:
        return lambda value: isinstance(value, kinds)
    return lambda value: isinstance(value, kinds) and not isinstance(value, bool)


def _check_items(inner: tuple[Any, ...]) -> Check:
    if len(inner) == 1 or inner[1:] == (...,):
        each = _check(inner[0])
        return lambda value: isinstance(value, tuple | list) and all(map(each, value))
    checks = [_check(part) for part in inner]
    return lambda value: (
        isinstance(value, tuple | list)
        and len(value) == len(checks)
        and all(check(item) for check, item in zip(checks, value, strict=True))
    )
