"""Says of one picture what is wrong or doubtful, and which bars of the charts it belongs to. About 20 microseconds.

Imports what the trainer judges by, so a worker loads this module first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import floor, log2

from app.core.health.groups import Key
from app.core.pictures import Folder, Picture
from app.core.tags.splitting import Lines, split_tags
from trainer.config.recipe import RecipeConfig
from trainer.dataset.caption_files import split_caption
from trainer.dataset.dataset import doubts_of_shape
from trainer.dataset.folders import chain_of, folder_marks
from trainer.dataset.picture import choose_bucket, region_of
from trainer.dataset.sampling import holds_trigger
from trainer.dataset.sidecar import FolderNotes

TOKEN_STEP = 15
"""Tokens that one bar of the chart stands for; the marks at 75, 150 and 225 are bounds of bars."""
TOKEN_BARS = 20
"""From the last bar on all longer captions are together."""
CELLS_PER_DOUBLING = 4
"""Steps of the chart of sizes within one doubling of a side."""

CountTokens = Callable[[str], int | None]


@dataclass
class Judge:
    """The yardsticks; `tokens` returns None for a text that is not counted yet, and has it counted."""

    recipe: RecipeConfig
    tokens: CountTokens
    lines: Lines = "caption"
    _class_words: dict[Folder, str] = field(default_factory=dict)

    def keys(self, picture: Picture, known: Sequence[str] = ()) -> list[Key]:
        """Return all that a picture is filed under; `known` are the codes that a look at its files gave."""
        if picture.excluded:
            return [("mark", "picture.excluded")]
        if picture.problem:
            return [("mark", "picture.unusable")]
        keys: list[Key] = [("mark", code) for code in known]
        keys += self._shape(picture)
        keys += self._caption(picture)
        keys.append(("mask", "with") if picture.mask else ("mark", "mask.missing"))
        keys.append(("folder", picture.folder))
        return keys

    def captions(self, picture: Picture) -> list[str]:
        """Return the texts that are trained, but for chance: the trigger first unless the caption holds it."""
        return self._trained(picture, self._written(picture))

    def _written(self, picture: Picture) -> tuple[str, ...]:
        return split_caption(picture.caption or "", self.lines)

    def _trained(self, picture: Picture, written: Sequence[str]) -> list[str]:
        trigger = (picture.folder.trigger or "").strip()
        return [_led(text, trigger) for text in written or (self._words(picture.folder),)]

    def _shape(self, picture: Picture) -> list[Key]:
        if not picture.width or not picture.height:
            return []
        _, _, *size = region_of(picture.width, picture.height, picture.crop)
        width, height = size
        cell = ("cell", (cell_of(width), cell_of(height)))
        bucket = choose_bucket(width, height, self.recipe)
        if bucket is None:
            return [cell, ("mark", "picture.tiny")]
        doubts = doubts_of_shape((width, height), bucket, self.recipe)
        shape: list[Key] = [] if picture.folder.regularisation else [("shape", bucket)]
        return [cell, ("bucket", bucket), *shape, *(("mark", code) for code in doubts)]

    def _caption(self, picture: Picture) -> list[Key]:
        keys: list[Key] = [("mark", "caption.clash")] if picture.clash else []
        written = self._written(picture)
        trained = self._trained(picture, written)
        if not written:
            missing = "missing" if picture.caption is None else "empty"
            keys.append(("mark", f"caption.{'words' if any(trained) else missing}"))
        elif trained != [*written]:
            keys.append(("mark", "trigger.absent"))
        if written and any(len(tag) == 1 for tag in split_tags(picture.caption, self.lines)):
            keys.append(("mark", "tag.one_letter"))
        counts = [self.tokens(text) for text in trained]
        if None in counts:
            return [*keys, ("uncounted", "tokens")]
        count = max(count for count in counts if count is not None)
        keys.append(("tokens", min(max(count - 1, 0) // TOKEN_STEP, TOKEN_BARS - 1)))
        if count > self.recipe.token_chunks:
            keys.append(("mark", "caption.long"))
        return keys

    def _words(self, folder: Folder) -> str:
        """Return the class words that the names of folders give, as 10_cat does."""
        if folder not in self._class_words:
            chain = [(path.name, FolderNotes()) for path in chain_of(folder.root, folder.path)]
            self._class_words[folder] = folder_marks(chain).class_words or ""
        return self._class_words[folder]


def _led(text: str, trigger: str) -> str:
    if not trigger or holds_trigger(text, trigger):
        return text
    return f"{trigger}, {text}" if text else trigger


@lru_cache(maxsize=65536)
def cell_of(side: int) -> int:
    """Return the row or column of a side in the chart of sizes, whose steps are even on a logarithmic scale."""
    return floor(log2(max(side, 1)) * CELLS_PER_DOUBLING)
