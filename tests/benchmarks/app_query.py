"""Measure searches at 100,000 images: every kind of term, the tag index, and completion.

    python -m tests.benchmarks.app_query [--images 100000] [--write]

CPU time of this thread, the median of several calls, so that other programs' work does not count; `--write` puts the
table into its section of tests/benchmarks/results/app.md.
"""

from __future__ import annotations

import argparse
import queue
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

from app.core.library import Folder, Library, ValueChange
from app.core.query.finder import Finder
from app.core.tags.completion import Completer, TagList, Vocabulary, Word
from app.core.tags.index import TagIndex
from app.core.tasks import Tasks
from tests.benchmarks.app_results import write_section

NOTE = """Processor time of the window's thread, median of 7 calls, unless it says otherwise.
Written by `python -m tests.benchmarks.app_query --write`."""
TAGS_A_PICTURE = 20
DISTINCT = 10_000
LISTED = 140_000
QUERIES = (
    "tag:{common}",
    "tag:{rare}",
    "-tag:{common}",
    "tag:*a*b*",
    "tag:a*",
    "caption:{part}",
    'caption:"{common}, {part}"',
    "{part}",
    "img_0001",
    "name:99",
    "folder:sub",
    "path:sub/img_00",
    "size:<512",
    "width:>=1024",
    "height:600..700",
    "ratio:>1.5",
    "tags:>19",
    "chars:>200",
    "tokens:>75",
    "rating:>=3",
    "missing:caption",
    "missing:rating",
    "problem:",
    "dup:",
    "mask:",
    "crop:no",
    "excluded:",
    "tag:{common} -tag:{rare} size:<512 rating:>=3",
    "(tag:{common} or missing:mask) and not (name:9 or excluded:)",
)


def words(count: int, chance: random.Random) -> list[str]:
    """Return different tags of one to three made-up words."""
    syllables = [first + second for first in "bcdfghklmnprstvw" for second in "aeiou"]
    made: dict[str, None] = {}
    while len(made) < count:
        parts = ["".join(chance.choices(syllables, k=chance.randint(2, 3))) for _ in range(chance.randint(1, 3))]
        made[" ".join(parts)] = None
    return list(made)


def captions(count: int, tags: list[str], chance: random.Random) -> Iterator[str]:
    """Yield captions with a realistic tag distribution: the n-th tag is used about 1/n as often as the first."""
    weights = [1 / (place + 3) for place in range(len(tags))]
    for _ in range(count):
        yield ", ".join(dict.fromkeys(chance.choices(tags, weights, k=TAGS_A_PICTURE)))


def filled(count: int, tags: list[str], chance: random.Random) -> Library:
    """Return a library of so many images with everything that queries use."""
    root = Path("data") / "set"
    folders = [Folder(root, root), Folder(root / "sub", root)]
    library = Library()
    library.add(
        (
            folders[number * 2 // count],
            f"img_{number:06}.png",
            {
                "caption": caption if chance.random() > 0.02 else None,
                "width": chance.randint(300, 2000),
                "height": chance.randint(300, 2000),
                "rating": chance.choice([None, None, 1, 3, 5]),
                "mask": chance.random() < 0.1,
                "crop": (0.0, 0.0, 0.5, 1.0) if chance.random() < 0.1 else None,
                "excluded": chance.random() < 0.05,
                "problem": "It is damaged." if chance.random() < 0.001 else None,
                "content": f"{chance.randrange(count * 10):064x}",
            },
        )
        for number, caption in enumerate(captions(count, tags, chance))
    )
    return library


def milliseconds(call: Callable[[], object], times: int = 7) -> float:
    """Return the CPU time of one call, the median of several."""
    taken = []
    for _ in range(times):
        start = time.thread_time()
        call()
        taken.append(1000 * (time.thread_time() - start))
    return median(taken)


def built(library: Library) -> tuple[TagIndex, float, float, int]:
    """Build the index in slices; return it, the longest slice and the total in ms of this thread, and their number."""
    calls: queue.Queue[Callable[[], None]] = queue.Queue()
    tasks = Tasks(calls.put)
    index = TagIndex(library, tasks)
    slices = []
    while index.pending:
        call = calls.get()
        start = time.thread_time()
        call()
        slices.append(1000 * (time.thread_time() - start))
    tasks.close()
    return index, max(slices), sum(slices), len(slices)


def measured(count: int) -> list[tuple[str, str]]:
    """Return all measurements with their names."""
    chance = random.Random(1)
    tags = words(DISTINCT, chance)
    library = filled(count, tags, chance)
    index, longest, whole, slices = built(library)
    rows = [
        ("index build: whole, in this thread", f"{whole:.0f} ms in {slices} slices"),
        ("index build: longest slice", f"{longest:.1f} ms"),
    ]
    rows += of_queries(library, index, tags)
    rows += of_one_caption(library, index)
    rows += of_completion(index, tags, chance)
    return rows


def of_queries(library: Library, index: TagIndex, tags: list[str]) -> list[tuple[str, str]]:
    """Return the times of all queries, once token counts are available."""
    calls: queue.Queue[Callable[[], None]] = queue.Queue()
    tasks = Tasks(calls.put)
    finder = Finder(library, index, tasks)
    rows = []
    start = time.perf_counter()
    finder.find("tokens:>75")
    while finder.pending:
        calls.get()()
    rows.append(("tokens counted behind, on the wall", f"{time.perf_counter() - start:.1f} s"))
    for query in QUERIES:
        quote = "" if '"' in query else '"'
        text = query.format(common=f"{quote}{tags[0]}{quote}", rare=f'"{tags[-5]}"', part=tags[40][:5])
        found = finder.find(text)
        rows.append(
            (f"`{query}` ({len(found):,} found)", f"{milliseconds(lambda text=text: finder.find(text)):.1f} ms")
        )
    tasks.close()
    return rows


def of_one_caption(library: Library, index: TagIndex) -> list[tuple[str, str]]:
    """Return the time of a change of one caption, including index and names."""
    number = next(iter(library.images))

    def change() -> None:
        before = library.images[number].caption or ""
        library.apply([ValueChange(number, "caption", before, f"{before}, one more")])

    common = max(index.counts().items(), key=lambda pair: pair[1])[0]
    return [
        ("one caption changed", f"{milliseconds(change):.2f} ms"),
        (
            f"tags seen together with one of {index.count(common):,} images",
            f"{milliseconds(lambda: index.co_occurring(common)):.0f} ms",
        ),
    ]


def of_completion(index: TagIndex, tags: list[str], chance: random.Random) -> list[tuple[str, str]]:
    """Return the slowest completion of many typed texts, with a list of 140,000 tags."""
    listed = words(LISTED, chance)
    made = tuple(Word(name.replace(" ", "_"), LISTED - n, 0, (name[::-1],)) for n, name in enumerate(listed))
    completer = Completer(index, Vocabulary([TagList(Path("list.csv"), made)]))
    completer.complete("warm")
    some = chance.sample([*tags, *listed], 60)
    typed = [text for tag in some for text in (tag[:1], tag[:2], tag[:4], tag[2:5], f"{tag}q")]
    times = [(milliseconds(partial(completer.complete, text), 3), text) for text in typed]
    slowest, text = max(times)
    middle = median(spent for spent, _ in times)
    return [
        (f"completion with {LISTED:,} listed tags: median of {len(times)} texts", f"{middle:.2f} ms"),
        (f'completion: slowest ("{text}")', f"{slowest:.1f} ms"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    rows = measured(arguments.images)
    title = f"Finding: {arguments.images:,} images, {TAGS_A_PICTURE} tags each, {DISTINCT:,} different"
    table = "\n".join(["| what | time |", "|---|---|", *(f"| {what} | {figure} |" for what, figure in rows)])
    print(f"{title}\n{table}")  # noqa: T201
    if arguments.write:
        write_section("Finding", f"{title}.\n{NOTE}\n\n{table}\n")


if __name__ == "__main__":
    main()
