"""Two small indexes over pictures that are cheap to keep right: by what they have, and by what they share."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Set
from typing import TYPE_CHECKING, Any, NamedTuple

from app.core.tags.splitting import Lines

if TYPE_CHECKING:
    from trainer.config.recipe import RecipeConfig


Key = tuple[str, Hashable]
"""What a picture can be filed under: a kind ("mark", "bucket", "tokens", ...) and which of it."""
_NONE: frozenset[int] = frozenset()
TOKEN_MARKS = (75, 150, 225)
"""Tokens that one, two and three chunks of the text encoder read."""
NATIVE: Mapping[str, int] = {"sd15": 512, "sdxl": 1024}
"""Native resolutions, as trainer.config.base has them; that module brings pydantic."""


class Files:
    """Pictures filed under any number of keys; one picture's keys are replaced in a few microseconds."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Key, ...]] = {}
        self._combinations: dict[tuple[Key, ...], tuple[Key, ...]] = {}
        self._kinds: dict[str, dict[Hashable, set[int]]] = {}

    def put(self, image: int, keys: Iterable[Key]) -> None:
        """File a picture under these keys and no others; none: forget it."""
        # One tuple for all pictures of the same keys: 100,000 would keep the garbage collector busy for 0.1 s.
        new = tuple(keys)
        new = self._combinations.setdefault(new, new)
        before = self._of.get(image, ())
        if new == before:
            return
        for kind, which in before:
            if (kind, which) not in new:
                self._kinds[kind][which].discard(image)
                if not self._kinds[kind][which]:
                    del self._kinds[kind][which]
        for kind, which in new:
            self._kinds.setdefault(kind, {}).setdefault(which, set()).add(image)
        if new:
            self._of[image] = new
        else:
            self._of.pop(image, None)

    def under(self, kind: str, which: Hashable) -> Set[int]:
        """Return the pictures under one key: the index's own set, not to be changed."""
        return self._kinds.get(kind, {}).get(which, _NONE)

    def all(self, kind: str) -> Mapping[Hashable, Set[int]]:
        """Return what there is of a kind, each with its pictures; not to be changed."""
        return self._kinds.get(kind, {})


class SharedIndex:
    """Which pictures have something (content, place and stem) in common with another one."""

    def __init__(self) -> None:
        self.images: set[int] = set()
        """All that share theirs."""
        self._key: dict[int, Hashable] = {}
        self._first: dict[Hashable, int] = {}
        self._groups: dict[Hashable, set[int]] = {}

    def put(self, image: int, key: Hashable | None) -> None:
        """Say what a picture has; None: nothing to share."""
        before = self._key.get(image)
        if key == before:
            return
        if before is not None:
            self._leave(image, before)
        if key is not None:
            self._key[image] = key
            first = self._first.setdefault(key, image)
            if first != image:
                group = self._groups.setdefault(key, {first})
                group.add(image)
                self.images |= group

    def groups(self) -> list[list[int]]:
        """Return the pictures that share, those that share the same together."""
        return [sorted(group) for group in tuple(self._groups.values())]

    def _leave(self, image: int, key: Hashable) -> None:
        del self._key[image]
        self.images.discard(image)
        group = self._groups.get(key)
        if group is None:
            del self._first[key]
            return
        group.discard(image)
        self._first[key] = next(iter(group))
        if len(group) == 1:
            self.images -= group
            del self._groups[key]


class JudgingTarget(NamedTuple):
    """A training to come, as far as pictures can suit it or not."""

    resolution: int = 1024
    """Side of the square whose area every bucket has, in pixels: 1024 for SDXL, 512 for SD 1.5."""
    tokens: int = 75
    """How many tokens of a caption are read: one of TOKEN_MARKS."""
    lines: Lines = "caption"
    """How captions of several lines are read."""

    def recipe(self) -> RecipeConfig:
        """Return a recipe with this aim and all else as the trainer has it by default; raises pydantic's ValueError."""
        from trainer.config.recipe import RecipeConfig

        return RecipeConfig.model_validate({"resolution": self.resolution, "token_chunks": self.tokens})


def aim_of(values: Mapping[str, Any], native: int) -> JudgingTarget:
    """Return what a job's values say; `native` is the resolution that its base has, wrong values count as absent."""
    recipe, dataset = _table(values, "recipe"), _table(values, "dataset")
    resolution, tokens = recipe.get("resolution"), recipe.get("token_chunks")
    if not isinstance(resolution, int) or not 64 <= resolution <= 4096 or resolution % 8:
        resolution = native
    return JudgingTarget(
        resolution,
        tokens if tokens in TOKEN_MARKS else JudgingTarget().tokens,
        "variants" if dataset.get("lines") == "variants" else "caption",
    )


def _table(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = values.get(name)
    return table if isinstance(table, Mapping) else {}
