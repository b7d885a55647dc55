"""Finds a base on this machine, or brings it here: a file, a folder, a Hub id or a direct link."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainer.base.hub import fetch_from_hub
from trainer.base.link import fetch_link
from trainer.config.paths import absolute, is_base_path
from trainer.errors import BaseModelError

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Fetched:
    """A base on this machine, and the commit it is of where it came from the Hub."""

    path: Path
    revision: str | None = None


def fetch_base(model: str, revision: str | None = None, progress: Progress | None = None) -> Fetched:
    """Return where the base lies, after downloading it unless it is here already; raises BaseModelError."""
    if "://" in model:
        return Fetched(fetch_link(model, progress))
    if not is_base_path(model, Path.cwd()):
        return Fetched(*fetch_from_hub(model, revision, progress))
    path = Path(absolute(model, Path.cwd()))
    if path.exists():
        return Fetched(path)
    near = difflib.get_close_matches(path.name, _neighbours(path), n=1)
    remedy = f'Did you mean "{near[0]}", in the same folder?' if near else "Check the path for a typing mistake."
    raise BaseModelError("base.missing", f'"{model}" does not exist.', remedy)


def _neighbours(path: Path) -> list[str]:
    try:
        return [entry.name for entry in path.parent.iterdir()]
    except OSError:  # the folder itself is missing or closed to us
        return []
