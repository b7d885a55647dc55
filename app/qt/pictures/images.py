"""Thumbnails as Qt paints them: scaled to the screen's own pixels once, and kept while they are near."""

from __future__ import annotations

from collections import OrderedDict
from time import perf_counter

from PySide6.QtCore import QSize, Qt
from PySide6.QtGui import QImage, QPixmap

from app.core.disk.thumbnails import Thumbnail, Thumbnails
from app.core.library import Picture

_MEMORY = 48 << 20
_BUDGET = 0.006
"""Seconds that one painting may spend on new pixmaps; the rest comes with the next."""


class Images:
    """Makes pixmaps of thumbnails, on the window's thread, a few at a time."""

    def __init__(self, thumbnails: Thumbnails) -> None:
        self._thumbnails = thumbnails
        self._kept: OrderedDict[tuple[int, int], tuple[Thumbnail, QPixmap]] = OrderedDict()
        self._weight = 0
        self._until = 0.0
        self.behind = False
        """Whether the last painting had to leave some for the next."""

    def begin(self) -> None:
        """Start another painting."""
        self._until, self.behind = perf_counter() + _BUDGET, False

    def pixmap(self, picture: Picture, edge: int, side: int, ratio: float) -> QPixmap | str | None:
        """Return a picture to fit a square of `side`, why there is none, or None while it is being made."""
        thumbnail = self._thumbnails.get(picture, edge)
        key = (picture.id, round(side * ratio))
        kept = self._kept.get(key)
        if thumbnail is None:
            return kept[1] if kept else None
        if thumbnail.problem is not None:
            return thumbnail.problem
        if kept and kept[0] is thumbnail:
            self._kept.move_to_end(key)
            return kept[1]
        if perf_counter() > self._until:
            self.behind = True
            return kept[1] if kept else None
        return self._keep(key, thumbnail, scaled(thumbnail, round(side * ratio), ratio))

    def _keep(self, key: tuple[int, int], thumbnail: Thumbnail, pixmap: QPixmap) -> QPixmap:
        if key in self._kept:
            self._weight -= _weight(self._kept.pop(key)[1])
        self._kept[key] = thumbnail, pixmap
        self._weight += _weight(pixmap)
        while self._weight > _MEMORY and len(self._kept) > 1:
            _, (_, oldest) = self._kept.popitem(last=False)
            self._weight -= _weight(oldest)
        return pixmap


def scaled(thumbnail: Thumbnail, side: int, ratio: float) -> QPixmap:
    """Return a thumbnail to fit a square of `side` device pixels, of which there are `ratio` to one of the layout."""
    image = QImage(thumbnail.rgb, thumbnail.width, thumbnail.height, 3 * thumbnail.width, QImage.Format.Format_RGB888)
    size = QSize(thumbnail.width, thumbnail.height)
    longest = max(thumbnail.width, thumbnail.height)
    fits = min(side, round(longest * ratio))  # a small picture is as large beside the words as at 100 %
    if fits != longest:
        size.scale(fits, fits, Qt.AspectRatioMode.KeepAspectRatio)
        image = image.scaled(
            size.expandedTo(QSize(1, 1)),
            Qt.AspectRatioMode.IgnoreAspectRatio,
            Qt.TransformationMode.SmoothTransformation,
        )
    pixmap = QPixmap.fromImage(image)
    pixmap.setDevicePixelRatio(ratio)
    return pixmap


def _weight(pixmap: QPixmap) -> int:
    return pixmap.width() * pixmap.height() * 4
