"""Takes the pictures of closed datasets out of the library, in portions between which the window lives."""

from __future__ import annotations

from collections.abc import Sequence

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

    def finish(self) -> None:
        """Forget the rest now."""
        left, self._left = self._left, []
        self._library.remove(left)

    def _go_on(self) -> None:
        some, self._left = self._left[-_AT_ONCE:], self._left[:-_AT_ONCE]
        self._library.remove(some)
        if self._left:
            self._post(self._go_on)
