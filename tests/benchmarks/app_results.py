"""Write the sections of tests/benchmarks/results/app.md, one for each benchmark of the app."""

from __future__ import annotations

import re
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "app.md"
_TITLE = "# What the app takes\n"


def write_section(name: str, text: str, path: Path = RESULTS) -> None:
    """Replace the section of this name, or append it; other sections stay as they are."""
    whole = path.read_text(encoding="utf-8") if path.exists() else _TITLE
    section = f"## {name}\n\n{text.strip()}\n"
    former = re.compile(rf"^## {re.escape(name)}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    if former.search(whole):
        whole = former.sub(lambda found: section + ("\n" if found.end() < len(whole) else ""), whole, count=1)
    else:
        whole = f"{whole.rstrip()}\n\n{section}"
    path.write_text(whole, encoding="utf-8", newline="\n")
