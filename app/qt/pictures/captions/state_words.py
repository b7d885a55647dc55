"""The editor's words about captions: whether they are there, how they are read, how long they are."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QObject

from app.core.library import Picture
from app.core.tags.index import Summary
from app.core.tags.splitting import Lines
from app.qt.pictures.captions.tokens import CHUNK, Measured

Told = tuple[str, str]
"""A sentence and the role of the label that shows it."""


class StateWords(QObject):
    """Makes sentences; each with the look it takes."""

    def title(self, count: int, hidden: int) -> str:
        """Return what stands over the captions of many pictures, or of none."""
        if count:
            return self.tr("%n picture(s)", "", count)
        return self.tr("No selected picture is shown") if hidden else self.tr("No picture selected")

    def hint(self, count: int, hidden: int) -> str:
        """Return what can be done with no picture, or with many, and how many of the selected a filter hides."""
        words = self.tr("The filter hides %n selected picture(s); nothing is changed there.", "", hidden)
        parts = [words] if hidden else []
        if not count and not hidden:
            parts.append(self.tr("Choose a picture to write its caption, or several to tag them together."))
        if count > 1:
            parts.append(self.tr("A tag that you add or remove is added to or removed from all of them."))
        return " ".join(parts)

    def of_one(self, picture: Picture, lines: Lines) -> Told:
        """Return what is to be known of one picture's caption."""
        parts = [self._caption(picture, lines)]
        role = "warning" if not (picture.caption or "").strip() else "muted"
        if picture.excluded:
            parts.append(self.tr("Excluded from training."))
        if picture.problem:
            parts.append(picture.problem.replace(str(picture.path), picture.name))  # the whole way takes three lines
            role = "bad"
        return " ".join(part for part in parts if part), role

    def of_many(self, summary: Summary, pictures: Sequence[Picture]) -> Told:
        """Return how many of the pictures lack what."""
        excluded = sum(picture.excluded for picture in pictures)
        damaged = sum(picture.problem is not None for picture in pictures)
        words = [
            self.tr("%n without caption file", "", summary.missing) if summary.missing else "",
            self.tr("%n with an empty caption", "", summary.empty) if summary.empty else "",
            self.tr("%n excluded", "", excluded) if excluded else "",
            self.tr("%n damaged", "", damaged) if damaged else "",
        ]
        return ", ".join(word for word in words if word), "warning" if summary.missing or summary.empty else "muted"

    def of_tokens(self, measured: Sequence[Measured] | None, limit: int) -> Told:
        """Return how long the caption is; of several, the longest."""
        if measured is None:
            return self.tr("Counting tokens…"), "muted"
        longest = max(measured, key=lambda one: one.tokens)
        if longest.tokens > limit:
            words = self.tr("{count} of {limit} tokens, %n cut off", "", longest.tokens - limit)
            return words.format(count=longest.tokens, limit=limit), "warning"
        if limit > CHUNK and longest.tokens > CHUNK:
            row = (longest.tokens - 1) // CHUNK + 1
            words = self.tr("{count} of {limit} tokens, row {row} of {rows}")
            return words.format(count=longest.tokens, limit=limit, row=row, rows=limit // CHUNK), "muted"
        return self.tr("{count} of {limit} tokens").format(count=longest.tokens, limit=limit), "muted"

    def about_tokens(self, measured: Sequence[Measured] | None) -> str:
        """Return how they are counted."""
        words = self.tr("The text encoder reads 75 tokens in a row.")
        if measured and any(one.trigger for one in measured):
            words += " " + self.tr("Counted with the trigger word, which training puts first.")
        return words

    def there_already(self, tags: Sequence[str]) -> str:
        """Return that an added tag changed nothing."""
        return self.tr("{tag} is there already.").format(tag=", ".join(tags))

    def _caption(self, picture: Picture, lines: Lines) -> str:
        if picture.caption is None:
            return self.tr("No caption file yet; the first tag makes one.")
        if not picture.caption.strip():
            return self.tr("The caption file is empty.")
        count = sum(bool(row.strip()) for row in picture.caption.split("\n"))
        if count < 2:
            return ""
        if lines == "variants":
            return self.tr("%n caption(s) to choose from, one a line.", "", count)
        return self.tr("%n line(s), read as one caption.", "", count)
