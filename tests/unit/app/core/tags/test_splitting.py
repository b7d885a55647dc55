"""Captions taken apart into tags and put together again, compared with how the trainer reads them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.tags.splitting import find_tags, join_tags, remove_tag, replace_tag, split_tags
from trainer.dataset.caption_files import split_caption

TEXT = st.text(st.sampled_from("ab ,\\()\n\r\t猫\u2028") | st.characters(codec="utf-8"), max_size=40)


@pytest.mark.parametrize(
    ("text", "tags"),
    [
        (None, []),
        ("", []),
        (" , ,", []),
        ("cat", ["cat"]),
        ("  1girl,red hat ,, smile,", ["1girl", "red hat", "smile"]),
        (r"miku \(vocaloid\), a_b", [r"miku \(vocaloid\)", "a_b"]),
        ("cat,\n dog", ["cat", "dog"]),
        ("a red\n hat, dog\r\n", ["a red hat", "dog"]),
        ("cat, cat", ["cat", "cat"]),
    ],
)
def test_tags_are_what_stands_between_commas(text, tags):
    assert split_tags(text) == tags


def test_each_line_can_be_an_alternative():
    assert split_tags("red\nhat, cat", "variants") == ["red", "hat", "cat"]


@given(TEXT, st.sampled_from(["caption", "variants"]))
def test_tags_are_those_that_the_trainer_reads(text, lines):
    read = [part.strip() for caption in split_caption(text, lines) for part in caption.split(",") if part.strip()]
    assert split_tags(text, lines) == read


@given(TEXT, st.sampled_from(["caption", "variants"]))
def test_pieces_are_the_tags_at_their_places(text, lines):
    found = find_tags(text, lines)
    assert [piece.tag for piece in found] == split_tags(text, lines)
    for piece in found:
        assert " ".join(row.strip() for row in text[piece.start : piece.end].splitlines()).split() == piece.tag.split()


@given(TEXT, st.data())
def test_changing_one_tag_leaves_every_other_character(text, data):
    found = find_tags(text)
    if not found:
        return
    piece = data.draw(st.sampled_from(found))
    changed = replace_tag(text, piece, "new")
    assert changed.startswith(text[: piece.start])
    assert changed.endswith(text[piece.end :])
    assert split_tags(changed) == ["new" if other == piece else other.tag for other in found]
    assert replace_tag(text, piece, text[piece.start : piece.end]) == text


@given(TEXT, st.data())
def test_removing_one_tag_leaves_the_others(text, data):
    found = find_tags(text)
    if not found:
        return
    piece = data.draw(st.sampled_from(found))
    assert split_tags(remove_tag(text, piece)) == [other.tag for other in found if other != piece]


@pytest.mark.parametrize(
    ("text", "place", "left"),
    [
        ("a, b, c", 0, "b, c"),
        ("a, b, c", 1, "a, c"),
        ("a, b, c", 2, "a, b"),
        ("a", 0, ""),
        ("a,b ,c", 1, "a,c"),
        ("a,\nb,\nc", 1, "a,\n\nc"),
    ],
)
def test_what_remains_reads_as_if_typed(text, place, left):
    assert remove_tag(text, find_tags(text)[place]) == left


def test_joined_tags_are_split_again():
    assert split_tags(join_tags(["a", "b c", r"d \(e\)"])) == ["a", "b c", r"d \(e\)"]
