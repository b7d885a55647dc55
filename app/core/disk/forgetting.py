"""Takes the pictures of closed datasets out of the library, in portions between which the window lives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from app.core.library import Library
from app.core.tasks import Post

_AT_ONCE = 4000
"""Pictures forgotten in one go, some 15 ms for all who hear of it; a closed dataset of 100,000 took half a second."""


class Forgetting:
    """Pictures on their way out of the library; it belongs to the library's thread."""

    def __init__(self, library: Library, post: Post) -> None:
        self._library, self._post = library, post
        self._left: list[int] = []

    def begin(self, ids: Sequence[int]) -> None:
        """Forget these, the last ones first, as those in sight are mostly the first; at once where they are few."""
        self._left = [*ids, *self._left]
        if len(self._left) == len(ids):
            self._go_on()

    def finish(self, root: Path) -> None:
        """Forget now what is left of that folder, and of those that lie in it or that it lies in."""
        known = self._library.pictures
        left = {number: known[number].folder.root for number in self._left if number in known}
        here = {one for one in set(left.values()) if one.is_relative_to(root) or root.is_relative_to(one)}
        self._left = [number for number, of in left.items() if of not in here]
        self._library.remove([number for number, of in left.items() if of in here])

    def _go_on(self) -> None:
        some, self._left = self._left[-_AT_ONCE:], self._left[:-_AT_ONCE]
        self._library.remove(some)
        if self._left:
            self._post(self._go_on)
