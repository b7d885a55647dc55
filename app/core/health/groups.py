"""Indexes of images by key and by shared value, and the training settings by which images are judged."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Set
from typing import TYPE_CHECKING, Any, NamedTuple

from app.core.tags.splitting import Lines

if TYPE_CHECKING:
    from trainer.config.recipe import RecipeConfig


Key = tuple[str, Hashable]
"""Index key of an image: a kind ("mark", "bucket", "tokens", ...) and a value."""
_NONE: frozenset[int] = frozenset()
TOKEN_MARKS = (75, 150, 225)
"""Numbers of caption tokens that fit into one, two and three chunks of the text encoder."""
NATIVE_RESOLUTIONS: Mapping[str, int] = {"sd15": 512, "sdxl": 1024}
"""Native resolutions in pixels, copied from trainer.config.base because importing that loads pydantic."""


class ImageIndex:
    """Index of images by any number of keys; replacing one image's keys takes a few microseconds."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Key, ...]] = {}
        self._combinations: dict[tuple[Key, ...], tuple[Key, ...]] = {}
        self._kinds: dict[str, dict[Hashable, set[int]]] = {}

    def put(self, image: int, keys: Iterable[Key]) -> None:
        """Replace the keys of an image; without keys, remove it from the index."""
        # Images with equal keys share one tuple: 100,000 tuples would keep the garbage collector busy for 0.1 s.
        new = tuple(keys)
        new = self._combinations.setdefault(new, new)
        old = self._of.get(image, ())
        if new == old:
            return
        for kind, which in old:
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
        """Return the ids of the images with the key (kind, which). The result is a live set; do not modify it."""
        return self._kinds.get(kind, {}).get(which, _NONE)

    def all(self, kind: str) -> Mapping[Hashable, Set[int]]:
        """Map each value of a kind to the ids of the images with this value. Do not modify the result."""
        return self._kinds.get(kind, {})


class SharedIndex:
    """Index of images that share a value, such as their content, with at least one other image."""

    def __init__(self) -> None:
        self.images: set[int] = set()
        """Ids of all images that share their value with another image."""
        self._key: dict[int, Hashable] = {}
        self._first: dict[Hashable, int] = {}
        self._groups: dict[Hashable, set[int]] = {}

    def put(self, image: int, key: Hashable | None) -> None:
        """Set the value of an image; None removes the image from the index."""
        old = self._key.get(image)
        if key == old:
            return
        if old is not None:
            self._remove(image, old)
        if key is not None:
            self._key[image] = key
            first = self._first.setdefault(key, image)
            if first != image:
                group = self._groups.setdefault(key, {first})
                group.add(image)
                self.images |= group

    def groups(self) -> list[list[int]]:
        """Return one sorted list of image ids for each shared value."""
        return [sorted(group) for group in tuple(self._groups.values())]

    def _remove(self, image: int, key: Hashable) -> None:
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
    """Training settings that decide whether images and captions are suitable."""

    resolution: int = 1024
    """Side in pixels of a square with the same area as the buckets: 1024 for SDXL, 512 for SD 1.5."""
    tokens: int = 75
    """Number of caption tokens that training reads: one of TOKEN_MARKS."""
    lines: Lines = "caption"
    """Whether the lines of a caption form one caption or are alternative variants."""

    def recipe(self) -> RecipeConfig:
        """Return a recipe with these settings, and defaults for all others; raises ValueError if one is invalid."""
        from trainer.config.recipe import RecipeConfig

        return RecipeConfig.model_validate({"resolution": self.resolution, "token_chunks": self.tokens})


def judging_target(values: Mapping[str, Any], native: int) -> JudgingTarget:
    """Return the target that a job's values describe, with defaults for invalid and missing values.

    `native` is the resolution of the job's base.
    """
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
