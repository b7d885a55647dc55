"""One search for models on this PC, on a worker; what it finds is told piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from app.core.models.found import Found, Tool
from app.core.models.ground import Ground
from app.core.models.hub import bases_of_hub, own_bases
from app.core.models.known import Known
from app.core.models.searching import installations
from app.core.models.telling import models_in
from app.core.models.tools import Installation, recognise
from trainer.files.assets import asset_path

Share = Callable[[tuple[Installation, ...], tuple[Found, ...]], None]


class Search:
    """Looks at what is downloaded, at folders that the user named, at the tools of the last search, then for new ones.

    `share` is called from the worker with what has been found so far.
    """

    def __init__(self, ground: Ground, folders: Iterable[Path], stopped: Callable[[], bool], share: Share) -> None:
        self._ground = ground
        self._folders = tuple(folders)
        self._stopped = stopped
        self._share = share
        self._found: dict[str, Found] = {}
        self._tools: dict[Path, Installation] = {}

    def run(self) -> None:
        """Search until the end, or until `stopped` says so; then nothing is kept for the next search."""
        known = Known()
        self._take(known, "Impasto", self._own())
        for cache in self._ground.hubs:
            self._take(known, "Hugging Face", bases_of_hub(cache))
        for folder in self._folders:
            self._look_into(known, _installation(folder) or Installation("", folder, (folder,)))
        for before in known.installations:
            if before.tool and (again := _installation(before.folder)):
                self._look_into(known, again)
        for new in installations(self._ground, self._stopped):
            self._look_into(known, new)
        if not self._stopped():
            known.write(self._tools.values())

    def _own(self) -> Iterator[tuple[Path, str]]:
        yield asset_path("demo", "base"), "Demo"
        yield from own_bases()

    def _look_into(self, known: Known, tool: Installation) -> None:
        if tool.folder in self._tools:
            return
        self._tools[tool.folder] = tool
        for place in tool.bases:
            self._take(known, tool.tool, ((path, "") for path in models_in(place, self._stopped)))

    def _take(self, known: Known, tool: Tool, paths: Iterable[tuple[Path, str]]) -> None:
        for path, name in paths:
            if self._stopped():
                return
            if str(path) not in self._found:
                try:
                    told, size = known.tell(path)
                except OSError:  # gone while we looked, or not ours
                    continue
                plain = path.stem if path.suffix else path.name
                self._found[str(path)] = Found(path, tool, size, told, name or plain)
        self._share(tuple(self._tools.values()), tuple(self._found.values()))


def _installation(folder: Path) -> Installation | None:
    try:
        return recognise(folder)
    except (OSError, ValueError):
        return None
