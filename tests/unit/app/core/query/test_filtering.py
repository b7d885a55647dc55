"""What is shown follows the filter and the library, and what is worked on does not vanish under one's hands."""

import queue
from pathlib import Path

import pytest

from app.core.library import Folder, Library, ValueChange
from app.core.query.filtering import ActiveFilter, with_term
from app.core.query.finder import Finder
from app.core.query.language import QueryError, parse
from app.core.query.terms import Query, Term
from app.core.session import View
from app.core.tags.index import TagIndex
from app.core.tasks import Tasks

FOLDER = Folder(Path("data"), Path("data"))
CAT = Term("tag", "cat")


class Sitting:
    def __init__(self, captions):
        self.calls = queue.Queue()
        self.tasks = Tasks(self.calls.put)
        self.library = Library()
        self.view = View(self.library)
        index = TagIndex(self.library, self.tasks)
        finder = Finder(self.library, index, self.tasks)
        self.filtering = ActiveFilter(self.library, self.view, index, finder, self.calls.put)
        self.shown = 0
        self.view.shown.connect(self._count)
        self.add(captions)

    def _count(self, _):
        self.shown += 1

    def add(self, captions):
        start = len(self.library.images)
        self.library.add((FOLDER, f"{start + n:06}.png", {"caption": text}) for n, text in enumerate(captions))
        self.run()

    def run(self):
        while self.filtering.pending or not self.calls.empty():
            self.calls.get(timeout=120)()

    def write(self, number, caption):
        self.library.apply([ValueChange(number, "caption", self.library.images[number].caption, caption)])


@pytest.fixture
def sitting():
    made = Sitting(["cat", "dog", "cat, dog"])
    yield made
    made.tasks.close()


def test_without_a_filter_all_is_shown_and_new_pictures_appear(sitting):
    assert sitting.view.ids == [1, 2, 3]
    sitting.add(["bird"])
    sitting.library.remove([2])
    sitting.run()
    assert sitting.view.ids == [1, 3, 4]
    assert sitting.filtering.total == 3


def test_a_filter_shows_what_it_finds_and_follows_edits(sitting):
    sitting.filtering.apply("tag:cat")
    assert sitting.view.ids == [1, 3]
    sitting.write(2, "cat")
    sitting.write(3, "dog")
    assert sitting.view.ids == [1, 3]
    sitting.run()
    assert sitting.view.ids == [1, 2]


def test_many_changes_at_once_are_asked_for_once(sitting):
    sitting.filtering.apply("tag:cat")
    before = sitting.shown
    for number in (1, 2, 3):
        sitting.write(number, "bird, cat" if number == 2 else "bird")
    sitting.run()
    assert (sitting.view.ids, sitting.shown) == ([2], before + 1)


def test_what_is_worked_on_stays_until_the_filter_is_applied_anew(sitting):
    sitting.filtering.apply("tag:cat")
    sitting.view.select([1], 1)
    sitting.write(1, "bird")
    sitting.write(3, "bird")
    sitting.run()
    assert sitting.view.ids == [1]
    sitting.filtering.apply("tag:cat")
    assert sitting.view.ids == []
    assert sitting.view.selected == {1}


def test_a_wrong_filter_leaves_the_former_in_force(sitting):
    sitting.filtering.apply("tag:cat")
    with pytest.raises(QueryError):
        sitting.filtering.apply("tag:")
    assert (sitting.filtering.text, sitting.view.ids) == ("tag:cat", [1, 3])


def test_changes_that_cannot_matter_are_not_asked_for(sitting):
    sitting.filtering.apply("tag:cat")
    sitting.library.apply([ValueChange(1, "rating", None, 3)])
    assert sitting.calls.empty()
    sitting.filtering.apply("rating:3")
    sitting.library.apply([ValueChange(2, "rating", None, 3)])
    sitting.run()
    assert sitting.view.ids == [1, 2]


def test_answers_that_come_behind_are_shown_when_they_are_complete():
    sitting = Sitting(["cat"] * 1200)
    sitting.filtering.apply("tokens:1 tag:cat")
    assert sitting.filtering.pending
    sitting.run()
    sitting.tasks.close()
    assert len(sitting.view.ids) == 1200


@pytest.mark.parametrize(
    ("before", "exclude", "after"),
    [
        ("", False, "tag:cat"),
        ("", True, "-tag:cat"),
        ("dup:", False, "dup: tag:cat"),
        ("dup: -tag:cat", False, "dup: tag:cat"),
        ("tag:cat dup:", True, "dup: -tag:cat"),
        ("tag:cat", False, "tag:cat"),
        ("dup: or mask:", False, "(dup: or mask:) tag:cat"),
    ],
)
def test_a_filter_is_narrowed_by_a_tag(before, exclude, after):
    assert str(with_term(parse(before), CAT, exclude=exclude)) == after


def test_narrowing_shows_less(sitting):
    sitting.filtering.narrow(CAT)
    sitting.filtering.narrow(Term("tag", "dog"), exclude=True)
    assert (sitting.filtering.text, sitting.view.ids) == ("tag:cat -tag:dog", [1])
    assert sitting.filtering.query != Query()
