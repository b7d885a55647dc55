"""What is shown, selected and current: nothing that a filter hides can be worked on."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.core.library import Folder, Library
from app.core.session import View


@pytest.fixture
def library() -> Library:
    made = Library()
    folder = Folder(Path("data"), Path("data"))
    made.add((folder, f"{number}.png", {}) for number in range(4))
    return made


@pytest.fixture
def view(library: Library) -> View:
    made = View(library)
    made.show(library.images)
    return made


def test_a_current_picture_that_is_hidden_is_none_until_it_comes_back(view: View) -> None:
    told: list[int | None] = []
    first, second, *_ = view.ids
    view.select([first, second], first)
    view.selection.connect(lambda _: told.append(view.current))
    view.show([second])
    assert (view.current, list(view.scope())) == (None, [second])
    view.show([second])
    view.show([first, second])
    assert (view.current, list(view.scope())) == (first, [first, second])
    assert told == [None, first]


def test_who_hears_that_others_are_shown_sees_no_hidden_current(view: View) -> None:
    first, second, *_ = view.ids
    view.select([first], first)
    seen: list[int | None] = []
    view.shown.connect(lambda _: seen.append(view.current))
    view.show([second])
    assert seen == [None]


def test_what_is_chosen_before_it_is_shown_is_current_as_soon_as_it_is(library: Library) -> None:
    view = View(library)
    first = next(iter(library.images))
    view.select([first], first)
    assert (view.current, list(view.scope())) == (None, [])
    view.show(library.images)
    assert (view.current, list(view.scope())) == (first, [first])


def test_what_leaves_while_it_is_hidden_does_not_come_back(library: Library, view: View) -> None:
    first, second, *_ = view.ids
    view.select([first, second], first)
    view.show([second])
    library.remove([first])
    view.show([second])
    assert (view.current, view.selected) == (None, {second})
