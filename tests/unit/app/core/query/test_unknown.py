"""Tags asked for that no picture has, and which may have been meant."""

from pathlib import Path

import pytest

from app.core.library import Folder, Library
from app.core.query.completion import nearest, unknown_tags
from app.core.query.language import parse
from app.core.tags.index import TagIndex


@pytest.fixture
def index():
    library, folder = Library(), Folder(Path("x"), Path("x"))
    captions = ["red, red hat, Blue", "red, bed", r"miku \(vocaloid\), 猫耳", "a*b"]
    library.add((folder, f"{n}.png", {"caption": text}) for n, text in enumerate(captions))
    return TagIndex(library)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("redd", "red"),  # a letter too many
        ("rd", "red"),  # one missing
        ("rad", "red"),  # another one
        ("erd", "red"),  # two swapped
        ("ed", "red"),  # of two, the one that more pictures have
        ("red_hat", "red hat"),
        ("blux", "Blue"),
        ("猫耳朵", "猫耳"),
        ("miku (vocaloyd)", r"miku \(vocaloid\)"),
        ("something else", None),
    ],
)
def test_the_nearest_tag(index, typed, meant):
    assert nearest(index, typed) == meant


def test_only_plain_tags_that_no_picture_has_are_named(index):
    text = 'tag:red -tag:redd (tag:r*q or tag:"a\\*c") caption:redd'
    found = unknown_tags(parse(text), index)
    assert [(one.tag, one.suggestion, text[one.start : one.end]) for one in found] == [
        ("redd", "red", "tag:redd"),
        ("a*c", "a*b", 'tag:"a\\*c"'),
    ]
