"""What is wrong or doubtful in a dataset, each with its remedy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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
