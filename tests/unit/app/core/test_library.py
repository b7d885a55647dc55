"""The library: order, ids, and what it tells."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core import library as order
from app.core.library import Folder, Library, LibraryChange, ValueChange, natural_key

ROOT = Path("/data/cats")


def names(library: Library) -> list[str]:
    return [picture.path.relative_to(ROOT.parent).as_posix() for picture in library.images.values()]


def test_numbers_in_names_sort_by_their_value_and_letters_without_case() -> None:
    shuffled = ["b.png", "img 100.png", "A.png", "img 9.png", "img 010.png", "img 10.png", "img.png", "ä.png"]
    expected = ["A.png", "b.png", "img 9.png", "img 010.png", "img 10.png", "img 100.png", "img.png", "ä.png"]
    assert sorted(shuffled, key=natural_key) == expected


@given(st.lists(st.integers(0, 10**30), min_size=2, unique=True))
def test_numbers_of_any_length_sort_as_numbers(numbers: list[int]) -> None:
    ordered = sorted((f"a{number}z" for number in numbers), key=natural_key)
    assert ordered == [f"a{number}z" for number in sorted(numbers)]


@given(st.lists(st.text(max_size=8), min_size=2, max_size=8, unique=True))
def test_no_two_names_share_a_key(texts: list[str]) -> None:
    keys = sorted(map(natural_key, texts))
    assert all(before < after for before, after in pairwise(keys))


@given(st.lists(st.text(max_size=4)), st.integers(1, 5))
def test_names_sorted_in_portions_are_in_natural_order(texts: list[str], portion: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "_PORTION", portion)
        assert order.in_natural_order(dict.fromkeys(texts)) == sorted(set(texts), key=natural_key)


def test_pictures_stay_in_order_however_they_come() -> None:
    library = Library()
    sub = Folder(ROOT / "2_night", ROOT)
    late = Folder(ROOT / "10_day", ROOT)
    top = Folder(ROOT, ROOT)
    other = Folder(Path("/data/another"), Path("/data/another"))
    entries = [(sub, f"{n}.png", {}) for n in (1, 2, 10)] + [
        (late, "1.png", {}),
        (top, "z.png", {}),
        (top, "B.png", {}),
    ]
    random.Random(3).shuffle(entries)
    library.add(entries[:3])
    library.add([(other, "0.png", {})])
    for entry in entries[3:]:
        library.add([entry])
    cats = ["cats/B.png", "cats/z.png", "cats/2_night/1.png", "cats/2_night/2.png", "cats/2_night/10.png"]
    assert names(library) == [*cats, "cats/10_day/1.png", "another/0.png"]


def test_a_dataset_that_is_opened_again_comes_behind_all_that_are_open() -> None:
    library, other = Library(), ROOT.with_name("another")
    for root in (ROOT, other, ROOT, ROOT.with_name("birds")):
        library.remove([number for number, one in library.images.items() if one.folder.root == root])
        library.reserve_position(root)
        library.add([(Folder(root, root), "a.png", {})])
    assert names(library) == ["another/a.png", "cats/a.png", "birds/a.png"]


def test_a_file_that_comes_back_is_the_picture_that_it_was() -> None:
    library, told = Library(), list[LibraryChange]()
    folder = Folder(ROOT, ROOT)
    first, second = library.add([(folder, "a.png", {}), (folder, "b.png", {})])
    library.altered.connect(told.append)
    library.remove([first, 99])
    library.apply([ValueChange(first, "caption", None, "lost"), ValueChange(second, "caption", None, "kept")])
    assert library.images[second].caption == "kept"
    assert library.add([(folder, "a.png", {}), (folder, "c.png", {})]) == [first, 3]
    assert names(library) == ["cats/a.png", "cats/b.png", "cats/c.png"]
    assert [(set(a.added), set(a.removed), set(a.altered)) for a in told] == [
        (set(), {first}, set()),
        (set(), set(), {second}),
        ({first, 3}, set(), set()),
    ]
