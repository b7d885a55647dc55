"""Base class of all job tables, and descriptions of their keys for forms, help texts and messages."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

LONGEST_HELP = 120
"""Number of characters of the longest help text of a key."""
_Value = TypeVar("_Value")


class BrokenRulesError(ValueError):
    """A table violates rules between its keys; each is given as (key relative to the table, reason)."""

    def __init__(self, problems: tuple[tuple[str, str], ...]) -> None:
        super().__init__("; ".join(f"{key}: {reason}" for key, reason in problems))
        self.problems = problems


class Section(BaseModel):
    """A table of a job file.

    Unknown keys are errors, and types are strict: a string is never read as a number. TOML lists become tuples. Each
    field's docstring is its help text in forms and job files; ``Field(title=...)`` sets its label.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    def rules(self) -> Iterator[tuple[str, str]]:
        """Yield (key, reason) for each rule between keys of this table that is violated."""
        return iter(())

    @model_validator(mode="after")
    def _keep_rules(self) -> Self:
        if problems := tuple(self.rules()):
            raise BrokenRulesError(problems)
        return self

    def replaced(self, **updates: Any) -> Self:
        """Return a copy with some fields replaced, validated again (pydantic's model_copy does not validate)."""
        fields = type(self).model_fields
        values = {fields[name].alias or name: value for name, value in self if name in self.model_fields_set}
        return type(self).model_validate(values | updates)


def nearest(word: str, names: Sequence[str]) -> str | None:
    """Return the name most similar to ``word``, or None if none is similar enough."""
    return next(iter(difflib.get_close_matches(word, names, n=1, cutoff=0.6)), None)


def require_value(value: _Value | None) -> _Value:
    """Return a value that every frozen job has; raises ValueError for None, which means the job is not frozen."""
    if value is None:
        raise ValueError("a frozen job must have a value for every key that it runs with")
    return value


@dataclass(frozen=True, slots=True)
class RegistryNames:
    """Annotation of a text that must be one of a registry's names, which are too many to list in messages."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KeyDescription:
    """Description of one key of a job."""

    key: str
    """Dotted name of the key."""
    values: str
    """Description of the allowed values, worded to follow "must be"."""
    default: Any
    """Default value; None if the key is required or has no default."""
    required: bool
    doc: str
    """Help text: one line of at most ``LONGEST_HELP`` characters."""
    annotation: Any = None
    """Type annotation of the field."""
    title: str = ""
    """Label in forms; empty if it is derived from the key."""
    names: tuple[str, ...] = ()
    """All texts that are allowed, if they are a registry's names; empty for other keys."""


def fields(section: type[Section], prefix: str = "") -> Iterator[KeyDescription]:
    """Yield every key of ``section`` and of its tables, in file order.

    Keys in a list of tables appear once, with ``*`` as the index. A table with several kinds (the optimizer) yields
    ``name``, which selects the kind, and then the keys of every kind, with the kind's name in brackets.
    """
    for name, field in section.model_fields.items():
        key = prefix + (field.alias or name)
        default = None if field.default is PydanticUndefined else field.default
        doc = field.description or ""
        words = values_text(field.annotation, field)
        title, required = field.title or "", field.is_required()
        yield KeyDescription(key, words, default, required, doc, field.annotation, title, _registry(field))
        kinds = sections_in(field.annotation)
        if len(kinds) > 1:
            names = choices(field.annotation)
            choice: Any = Literal[tuple(names)]
            yield KeyDescription(
                f"{key}.name", _quoted(names), getattr(default, "name", ""), False, doc, choice, name.title()
            )
            for kind in kinds:
                inside = fields(kind, f"{key}[{kind_name(kind)}].")
                yield from (each for each in inside if not each.key.endswith("].name"))
        elif kinds:
            yield from fields(kinds[0], f"{key}.*." if _is_list(field.annotation) else f"{key}.")


def _registry(field: FieldInfo) -> tuple[str, ...]:
    return next((each.names for each in field.metadata if isinstance(each, RegistryNames)), ())


def sections_in(annotation: Any) -> list[type[Section]]:
    """Return the table classes that a field with this annotation may contain, directly or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for part in get_args(annotation) if not isinstance(part, str) for section in sections_in(part)]


def kind_name(section: type[Section]) -> str:
    """Return the value of ``name`` that selects this kind of table ("adamw"); empty for tables without kinds."""
    field = section.model_fields.get("name")
    return field.default if field is not None and isinstance(field.default, str) else ""


def choices(annotation: Any) -> list[str]:
    """Return the strings that a choice field accepts, or the names of its table's kinds."""
    if get_origin(annotation) is Literal:
        return [value for value in get_args(annotation) if isinstance(value, str)]
    kinds = sections_in(annotation)
    if kinds:
        return [kind_name(kind) for kind in kinds] if len(kinds) > 1 else []
    return [word for part in get_args(annotation) for word in choices(part)]


def values_text(annotation: Any, field: FieldInfo | None = None) -> str:
    """Describe the allowed values, worded to follow "must be", such as "a whole number from 1 to 1024"."""
    constraints = list(field.metadata) if field is not None else []
    examples = (field.examples if field is not None else None) or []
    return _words(annotation, constraints, examples)


def _words(annotation: Any, constraints: Sequence[Any], examples: Sequence[Any]) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extra = get_args(annotation)
        infos = [item for item in extra if isinstance(item, FieldInfo)]
        more = [constraint for info in infos for constraint in info.metadata]
        own = [example for info in infos for example in info.examples or ()]
        return _words(inner, [*constraints, *more], own or examples)
    if origin in (Union, types.UnionType):
        parts = [
            part
            for part in get_args(annotation)
            if part is not type(None) and not (part is int and float in get_args(annotation))
        ]
        return " or ".join(dict.fromkeys(_words(part, constraints, examples) for part in parts))
    if origin is Literal:
        return _quoted(get_args(annotation))
    if origin is dict:
        return "a table of values such as {weight_decay = 0.1}"
    if origin is tuple:
        item = _words(get_args(annotation)[0], (), examples)
        return "a list of tables" if item == "a table" else f"a list, each item {item}"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "a table"
    return _plain(annotation, constraints, examples)


def _plain(annotation: Any, constraints: Sequence[Any], examples: Sequence[Any]) -> str:
    if annotation is bool:
        return "true or false"
    if annotation is str:
        if examples:
            return "text such as " + " or ".join(f'"{example}"' for example in examples)
        longest = _limit(constraints, "max_length")
        return "text" + (f" of at most {longest} characters" if longest else "")
    number = "a whole number" if annotation is int else "a number"
    multiple = _limit(constraints, "multiple_of")
    return number + _range(constraints) + (f", a multiple of {multiple}" if multiple else "")


def _range(constraints: Sequence[Any]) -> str:
    low, above = _limit(constraints, "ge"), _limit(constraints, "gt")
    high, below = _limit(constraints, "le"), _limit(constraints, "lt")
    if low is not None and high is not None:
        return f" from {_number(low)} to {_number(high)}"
    words = (("of at least", low), ("above", above), ("up to", high), ("below", below))
    bounds = [f"{word} {_number(bound)}" for word, bound in words if bound is not None]
    return " " + " and ".join(bounds) if bounds else ""


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _limit(constraints: Sequence[Any], name: str) -> Any:
    return next((getattr(item, name) for item in constraints if getattr(item, name, None) is not None), None)


def _quoted(values: Sequence[Any]) -> str:
    words = [f'"{value}"' if isinstance(value, str) else str(value) for value in values]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]


def _is_list(annotation: Any) -> bool:
    """Return whether a field is a list of tables, which may be absent."""
    return any(get_origin(each) is tuple for each in (annotation, *get_args(annotation)))
