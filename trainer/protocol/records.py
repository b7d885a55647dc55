"""Conversion of dataclasses to JSON data and back, with fixed keys and type checks.

The keys are literals in the class's `@json_keys` decorator, so renaming an attribute does not change files. Types are
checked on reading, because a wrong type, such as a string for a step number, would otherwise cause an error much later,
in the code that shows the value.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from trainer.protocol.text import in_json

T = TypeVar("T")

_KEYS, _FORMER = "__json_keys__", "__former_json_keys__"
_LAST_MOMENT = 253_370_764_800.0  # in the year 9999; later times cannot be converted to a date

Check = Callable[[Any], bool]

_NUMBERS: Mapping[Any, tuple[type, ...]] = {float: (int, float), int: (int,)}


def json_keys(*keys: str, former: Mapping[str, str] | None = None) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that sets the JSON keys of a dataclass, in the order of its own fields.

    The keys of a base class come first. Put the decorator above `@dataclass`. Attributes may be renamed freely.
    After renaming a key, add it to `former`, which maps names in existing files to current names; both are read.
    """

    def state(kind: type[T]) -> type[T]:
        stated = (*getattr(kind, _KEYS, ()), *keys)
        if len(stated) != len(dataclasses.fields(cast("Any", kind))):
            raise TypeError(f"{kind.__name__} has a different number of fields and keys")
        if unknown := set((former or {}).values()) - set(stated):
            raise TypeError(f"{kind.__name__} has no keys {sorted(unknown)}")
        setattr(kind, _KEYS, stated)
        setattr(kind, _FORMER, {**getattr(kind, _FORMER, {}), **(former or {})})
        return kind

    return state


def to_record(value: Any) -> Any:
    """Return a value as plain data for JSON: dataclasses, including nested ones, become tables under their JSON keys.

    Raises TypeError for a dataclass without `json_keys`.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = _names(type(value), required=True)
        return {key: to_record(getattr(value, name)) for key, name in names.items()}
    if isinstance(value, Mapping):
        return {key: to_record(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_record(item) for item in value]
    return value


def build(kind: type[T], found: Mapping[str, Any], *, null_floats: bool = False) -> T:
    """Return an instance of `kind` built from the table `found`; unknown keys (of newer versions) are skipped.

    A list is accepted for a tuple and, with `null_floats`, null for a float. Raises TypeError for a missing field, a
    value of the wrong type, or a `found` that is not a mapping.
    """
    if not isinstance(found, Mapping):
        raise TypeError("it is not a table of names and values")
    former: Mapping[str, str] = getattr(kind, _FORMER, {})
    if not former.keys().isdisjoint(found):
        current = {key: value for key, value in found.items() if key not in former}
        found = {former.get(key, key): value for key, value in found.items()} | current
    checks, names = _checks(cast("Any", kind), null_floats), _names(cast("Any", kind))
    for key, name in names.items():
        if key in found and not checks[name](found[key]):
            raise TypeError(f'"{key}" has the invalid value {in_json(found[key])}')
    needed = {field.name for field in dataclasses.fields(cast("Any", kind)) if _is_needed(field)}
    if absent := [key for key, name in names.items() if name in needed and key not in found]:
        raise TypeError(f'"{absent[0]}" is missing')
    return kind(**{name: found[key] for key, name in names.items() if key in found})


def moment(value: Any) -> float:
    """Return `value` if it is a Unix time that can be shown as a date; raises ValueError or TypeError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("a time is not a number")
    if not 0 <= value < _LAST_MOMENT:
        raise ValueError(f"{value:g} is not a time")
    return float(value)


def _is_needed(field: dataclasses.Field[Any]) -> bool:
    return field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


@lru_cache(maxsize=256)
def _names(kind: type, required: bool = False) -> Mapping[str, str]:
    """Return a dataclass's attribute names by JSON key; without `json_keys`, the names themselves are the keys."""
    names = [field.name for field in dataclasses.fields(kind)]
    keys = getattr(kind, _KEYS, None)
    if keys is None and required:
        raise TypeError(f"{kind.__name__} has no json_keys")
    return dict(zip(keys or names, names, strict=True))


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


RENAMED_KEYS: Mapping[str, str] = {
    # 0.1.0
    "recipe.clip_gradient": "max_grad_norm",
    "recipe.pictures": "images",
    "recipe.pictures_seen": "images_seen",
    "recipe.objective.debiased": "debiased_estimation",
    "recipe.objective.multires_levels": "multires_iterations",
    "fit.quantise": "quantize",
    "fit.allow_quantised": "allow_quantized",
    "fit.checkpointing": "gradient_checkpointing",
    "fit.graphs": "cuda_graphs",
    "ladder": "fallbacks",
    "ladder.quantise": "quantize",
    "ladder.checkpointing": "gradient_checkpointing",
    "output.licence": "license",
    "licence": "license",
    "card": "gpu",
    "preview.picture": "image",
    "folder.regularisation": "regularization",
}
"""New last part of each renamed key in jobs, presets and folder settings, by the former dotted key."""
RENAMED_VALUES: Mapping[str, Mapping[str, str]] = {"dataset.folders.kind": {"regularisation": "regularization"}}
"""Current names of renamed values, by the key's former dotted name and the former value."""


def renamed(data: Any, path: str = "") -> Any:
    """Return the data of a job, a preset, or a part of one, with former key and value names replaced by current ones.

    `path` is the part's dotted key in its file, such as "recipe" for a recipe alone. If data contains a key under both
    its old and its new name, the old name stays, so that validation reports it.
    """
    if isinstance(data, list):
        return [renamed(item, path) for item in data]
    if not isinstance(data, dict):
        return RENAMED_VALUES.get(path, {}).get(data, data) if isinstance(data, str) else data
    found: dict[str, Any] = {}
    for key, value in data.items():
        here = f"{path}.{key}".lstrip(".")
        name = RENAMED_KEYS.get(here, key)
        found[key if name in data else name] = renamed(value, here)
    return found


def renamed_key(key: str) -> str:
    """Return the current name of a dotted key, which may contain list indices ("dataset.folders.0.kind")."""
    former: list[str] = []
    present: list[str] = []
    for part in key.split("."):
        if part.isdigit():
            present.append(part)
            continue
        former.append(part)
        present.append(RENAMED_KEYS.get(".".join(former), part))
    return ".".join(present)


def renamed_flat(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job's values by dotted key, with former names replaced by current ones."""
    return {renamed_key(key): renamed(value, _without_indices(key)) for key, value in facts.items()}


def _without_indices(key: str) -> str:
    return ".".join(part for part in key.split(".") if not part.isdigit())
