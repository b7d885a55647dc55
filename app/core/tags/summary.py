"""What many captions have in common, and what only some of them have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from app.core.tags.index import TagCount
from app.core.tags.splitting import Lines, split_tags


@dataclass(frozen=True, slots=True)
class Summary:
    """Of captions; `common` in the order of the first one, `mixed` the most frequent first."""

    captions: int
    common: tuple[str, ...]
    mixed: tuple[TagCount, ...]
    missing: int
    """Pictures without caption file."""
    empty: int
    """Caption files in which nothing stands."""


def summarise(captions: Iterable[str | None], lines: Lines = "caption") -> Summary:
    """Count tags over captions, each once a caption; some 10 us a caption."""
    counts: Counter[str] = Counter()
    number = missing = empty = 0
    for number, caption in enumerate(captions, start=1):  # noqa: B007 - the last one is their count
        missing += caption is None
        empty += caption is not None and not caption.strip()
        counts.update(list(dict.fromkeys(split_tags(caption, lines))))
    common = tuple(tag for tag, count in counts.items() if count == number)
    mixed = tuple(TagCount(tag, count) for tag, count in counts.most_common() if count < number)
    return Summary(number, common, mixed, missing, empty)
