"""The tag index beside a plain recount of all captions, through random changes and through slices of workers."""

import queue
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.library import Folder, Library, ValueChange
from app.core.tags.index import TagIndex
from app.core.tasks import Tasks

FOLDER = Folder(Path("data"), Path("data"))
WORDS = ["cat", "Cat", "red hat", "red_hat", r"miku \(vocaloid\)", "miku (vocaloid)", ":d", "ß", "ss", "*"]
CAPTION = st.none() | st.lists(st.sampled_from([*WORDS, ""]), max_size=5).map(", ".join)


def library(*captions):
    made = Library()
    made.add((FOLDER, f"{number:06}.png", {"caption": caption}) for number, caption in enumerate(captions))
    return made


def tags(caption):
    return {part.strip() for part in (caption or "").split(",")} - {""}


def plain(text):
    return text.casefold().replace(r"\(", "(").replace(r"\)", ")")


def assert_equals_recount(index, made):
    expected = Counter(tag for picture in made.images.values() for tag in tags(picture.caption))
    assert index.counts() == expected
    assert len(index) == len(expected)
    for word in WORDS:
        with_it = {p.id for p in made.images.values() if any(plain(t) == plain(word) for t in tags(p.caption))}
        assert index.images_with(word) == with_it
        assert sorted(index.search(word)) == sorted(tag for tag in expected if plain(word) in plain(tag))
    for picture in made.images.values():
        assert set(index.row(picture.id)) == tags(picture.caption)
    by_count = sorted(expected.items(), key=lambda pair: (-pair[1], pair[0]))
    for typed in ["", "r", "red", "a", "hat", "MIKU ("]:
        first = [pair for pair in by_count if plain(pair[0]).startswith(plain(typed))]
        further = [pair for pair in by_count if plain(typed) in plain(pair[0]) and pair not in first]
        assert index.complete(typed) == (first + (further if len(typed) > 1 else []))[:20]


OPERATION = st.tuples(st.sampled_from(["add", "remove", "apply", "learn"]), st.lists(CAPTION, min_size=1, max_size=4))


@given(st.lists(CAPTION, max_size=6), st.lists(OPERATION, max_size=8), st.randoms(use_true_random=False))
def test_index_equals_a_recount_after_any_changes(captions, operations, chance):
    made = library(*captions)
    index = TagIndex(made)
    for kind, texts in operations:
        ids = list(made.images)
        chosen = chance.sample(ids, min(len(ids), len(texts)))
        if kind == "add":
            made.add((FOLDER, f"new{len(ids)}-{place}.png", {"caption": text}) for place, text in enumerate(texts))
        elif kind == "remove":
            made.remove(chosen)
        elif kind == "apply":
            made.apply(
                ValueChange(number, "caption", made.images[number].caption, text)
                for number, text in zip(chosen, texts, strict=False)
            )
        else:
            made.set_facts(
                {number: {"caption": text} for number, text in zip(chosen, texts, strict=False)}, "file", "caption"
            )
        assert_equals_recount(index, made)


@pytest.fixture
def home():
    """The owner's thread as a queue, and workers."""
    calls = queue.Queue()
    tasks = Tasks(calls.put)
    yield calls, tasks
    tasks.close()


def run_until(calls, over):
    while not over():
        calls.get(timeout=120)()


def test_many_pictures_are_read_in_slices_by_workers(home):
    calls, tasks = home
    made = library(*(f"cat, number {number}" for number in range(1700)))
    index = TagIndex(made, tasks)
    assert index.pending == 1700
    steps = []
    index.changed.connect(lambda _: steps.append(index.pending))
    run_until(calls, lambda: not index.pending)
    assert steps == [1200, 700, 200, 0]
    assert_equals_recount(index, made)


def test_captions_changed_while_workers_read_are_read_again(home):
    calls, tasks = home
    made = library(*["cat"] * 1200)
    index = TagIndex(made, tasks)
    numbers = list(made.images)
    made.remove(numbers[:3])
    made.apply(ValueChange(number, "caption", "cat", "dog") for number in numbers[3:9] + numbers[-2:])
    run_until(calls, lambda: not index.pending)
    assert index.counts() == {"cat": 1189, "dog": 8}


def test_settling_reads_at_once_and_late_workers_change_nothing(home):
    calls, tasks = home
    made = library(*["cat"] * 1200)
    index = TagIndex(made, tasks)
    index.settle()
    assert index.counts() == {"cat": 1200}
    made.apply([ValueChange(next(iter(made.images)), "caption", "cat", "dog")])
    calls.get(timeout=120)()
    assert index.counts() == {"cat": 1199, "dog": 1}


def test_what_else_changes_of_a_picture_is_no_news():
    made = library("cat")
    index = TagIndex(made)
    news = []
    index.changed.connect(news.append)
    made.apply([ValueChange(1, "rating", None, 3)])
    made.apply([ValueChange(1, "caption", "cat", "cat ")])
    assert news == []
    made.apply([ValueChange(1, "caption", "cat ", "dog")])
    made.remove([1])
    assert len(news) == 2


def test_tags_that_stand_together():
    index = TagIndex(library("cat, red, hat", "cat, red", "dog, red", "Cat, blue"))
    assert index.co_occurring("cat") == [("red", 2), ("blue", 1), ("hat", 1)]
    assert index.co_occurring("cat", 1) == [("red", 2)]
    assert index.co_occurring("bird") == []


@pytest.mark.parametrize("threaded", [False, True])
def test_lines_become_alternatives_and_one_caption_again(threaded):
    calls = queue.Queue()
    tasks = Tasks(calls.put) if threaded else None
    made = library("red\nhat, cat", "red hat", "dog\n", "a\ndog")
    index = TagIndex(made, tasks)

    def settled():
        while index.pending:
            calls.get(timeout=120)()
        return index.counts()

    as_one = {"red hat": 2, "cat": 1, "dog": 1, "a dog": 1}
    assert settled() == as_one
    index.read_lines("variants")
    assert settled() == {"red": 1, "hat": 1, "red hat": 1, "cat": 1, "dog": 2, "a": 1}
    index.read_lines("caption")
    assert settled() == as_one
    if tasks:
        tasks.close()
