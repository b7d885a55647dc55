"""What is wrong or doubtful in a dataset, each with its remedy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

Severity = Literal["error", "warning", "info"]
"""error: left out or wrong as it stands; warning: used, but doubtful; info: good to know."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One kind of thing found: `code` for programs, sentence and remedy for people, and the files concerned."""

    code: str
    sentence: str
    remedy: str
    paths: tuple[Path, ...] = ()
    severity: Severity = "warning"


def first_reason(fault: Exception) -> str:
    """Return why a file's contents were refused, as a part of a sentence: of many reasons the first."""
    if isinstance(fault, ValidationError):
        first = fault.errors()[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    return f"{fault} is missing" if isinstance(fault, KeyError) else str(fault)
