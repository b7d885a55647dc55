"""Finds a base on this machine, or brings it here: a file, a folder, a Hub id or a direct link."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from trainer.base.hub import fetch_from_hub
from trainer.base.link import fetch_link
from trainer.config.credentials import safe_link
from trainer.config.paths import absolute, is_base_path
from trainer.errors import BaseModelError
from trainer.protocol import places
from trainer.protocol.events import OnPhase


@dataclass(frozen=True, slots=True)
class Fetched:
    """A base on this machine, and the commit it is of where it came from the Hub."""

    path: Path
    revision: str | None = None


def fetch_base(model: str, revision: str | None = None, progress: OnPhase | None = None) -> Fetched:
    """Return where the base lies, after downloading it unless it is here already; raises BaseModelError."""
    try:
        if "://" in model:
            return Fetched(fetch_link(model, progress))
        if not is_base_path(model, Path.cwd()):
            return Fetched(*fetch_from_hub(model, revision, progress))
    except OSError as error:
        raise _storage_error(model, error) from error
    path = Path(absolute(model, Path.cwd()))
    if path.exists():
        return Fetched(path)
    near = difflib.get_close_matches(path.name, _neighbours(path), n=1)
    remedy = f'Did you mean "{near[0]}", in the same folder?' if near else "Check the path for a typing mistake."
    raise BaseModelError("base.missing", f'"{model}" does not exist.', remedy)


def _storage_error(model: str, error: OSError) -> BaseModelError:
    """Say why a download could not be written; the link is shown without its secrets and query."""
    shown, folder = safe_link(model).text.partition("?")[0], places.models_folder()
    if places.is_disk_full(error):
        sentence = f'The disk of "{folder}" filled up while "{shown}" was downloaded; what is here of it is kept.'
        remedy = "Make room and start again: the download goes on where it stopped."
        return BaseModelError("base.disk_full", sentence, remedy)
    sentence = f'"{shown}" cannot be downloaded to "{folder}": {error.strerror or error}.'
    return BaseModelError("base.not_writable", sentence, "Set IMPASTO_HOME to a folder that you may write to.")


def _neighbours(path: Path) -> list[str]:
    try:
        return [entry.name for entry in path.parent.iterdir()]
    except OSError:  # the folder itself is missing or closed to us
        return []
