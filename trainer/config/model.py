"""The strict pydantic base that every part of a job is built on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, model_validator

_Value = TypeVar("_Value")


class BrokenRulesError(ValueError):
    """Rules between keys that a table breaks: pairs of the key, relative to the table, and the reason."""

    def __init__(self, problems: tuple[tuple[str, str], ...]) -> None:
        super().__init__("; ".join(f"{key}: {reason}" for key, reason in problems))
        self.problems = problems


class Section(BaseModel):
    """A table of a job file: unknown keys are errors, each field's docstring is its help text.

    Values are taken as they are written (a text is never read as a number). Lists stay lists in TOML and become tuples.
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
        """Yield (key, reason) for each rule between keys of this table that is broken."""
        return iter(())

    @model_validator(mode="after")
    def _keep_rules(self) -> Self:
        if problems := tuple(self.rules()):
            raise BrokenRulesError(problems)
        return self

    def changed(self, **updates: Any) -> Self:
        """This table with some fields replaced, validated again (pydantic's own copy would skip that)."""
        fields = type(self).model_fields
        values = {fields[name].alias or name: value for name, value in self if name in self.model_fields_set}
        return type(self).model_validate(values | updates)


def stated(value: _Value | None) -> _Value:
    """Return a value that every frozen job states; raises ValueError for a job that is not frozen."""
    if value is None:
        raise ValueError("a frozen job states every value that it runs with")
    return value
