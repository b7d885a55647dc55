"""Changes of many captions at once: exactly what is asked, and not a character more."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.edits import bulk
from app.core.edits.bulk import PatternError
from app.core.edits.history import Edit
from app.core.tags.splitting import split_tags


def pictures(*captions: str | None) -> list[SimpleNamespace]:
    return [SimpleNamespace(id=number, caption=caption) for number, caption in enumerate(captions)]


def after(edit: Edit, *captions: str | None) -> list[str | None]:
    """The captions once the edit is done."""
    found = list(captions)
    for change in edit.changes:
        assert (change.field, change.before) == ("caption", captions[change.image])
        assert change.after != change.before
        found[change.image] = str(change.after)
    return found


def done(function: Callable[..., Edit], caption: str | None, *options: object, **named: object) -> str | None:
    return after(function(pictures(caption), *options, **named), caption)[0]


@pytest.mark.parametrize(
    ("caption", "at", "expected"),
    [
        ("cat, dog", None, "cat, dog, x, y"),
        ("cat, dog\n", None, "cat, dog, x, y\n"),
        ("cat, dog,", None, "cat, dog, x, y"),
        ("cat , dog", 0, "x, y, cat , dog"),
        ("cat ,  dog", 1, "cat ,  x, y, dog"),
        ("cat", 7, "cat, x, y"),
        (None, 0, "x, y"),
        ("", None, "x, y"),
        ("x, cat", None, "x, cat, y"),
        ("y, x", None, "y, x"),
    ],
)
def test_tags_are_added_at_a_place(caption: str | None, at: int | None, expected: str) -> None:
    assert done(bulk.add_tags, caption, ["x", "y"], at) == expected


@pytest.mark.parametrize(
    ("caption", "expected"),
    [("red, cat, red\n", "cat\n"), ("cat ,red,  dog", "cat ,dog"), ("redder", "redder"), (None, None), ("red", "")],
)
def test_tags_are_removed_with_their_comma(caption: str | None, expected: str | None) -> None:
    assert done(bulk.remove_tags, caption, ["red"]) == expected


@pytest.mark.parametrize(
    ("caption", "expected"),
    [("red , cat\n", "blue , cat\n"), ("red, blue", "blue"), ("red, a, red", "blue, a"), ("Red", "Red"), (None, None)],
)
def test_a_tag_is_renamed_without_being_doubled(caption: str | None, expected: str | None) -> None:
    assert done(bulk.rename_tag, caption, "red", "blue") == expected


@pytest.mark.parametrize(
    ("caption", "find", "replacement", "settings", "expected"),
    [
        ("a.c abc", "a.c", r"\1", {}, r"\1 abc"),
        ("ABC abc", "abc", r"\1", {"capitals": False}, r"\1 \1"),
        ("red hat, tall tree", r"(\w+) (\w+)", r"\2 \g<1>", {"pattern": True}, "hat red, tree tall"),
        ("Cat", "cat", "dog", {"pattern": True, "capitals": False}, "dog"),
    ],
    ids=["plainly", "plainly in any case", "by a pattern", "by a pattern in any case"],
)
def test_text_is_replaced(caption: str, find: str, replacement: str, settings: dict[str, bool], expected: str) -> None:
    assert done(bulk.replace_text, caption, find, replacement, **settings) == expected


def test_replacing_no_text_is_no_edit() -> None:
    assert not bulk.replace_text(pictures("cat"), "", "x")


@pytest.mark.parametrize(
    ("find", "replacement", "code", "position"),
    [("cat(", "", "bulk.pattern", 4), ("[z", "", "bulk.pattern", 2), ("a", r"\2", "bulk.template", None)],
)
def test_a_bad_pattern_is_told_with_its_place(find: str, replacement: str, code: str, position: int | None) -> None:
    with pytest.raises(PatternError) as told:
        bulk.replace_text(pictures("cat"), find, replacement, pattern=True)
    assert (told.value.code, told.value.position) == (code, position)
    if position is not None:
        assert f"at character {position + 1}" in told.value.sentence


def test_a_catastrophic_pattern_ends_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "PATIENCE", 0.1)
    began = time.monotonic()
    with pytest.raises(PatternError, match="takes too long on the caption"):
        bulk.replace_text(pictures("a" * 60 + "b"), r"(?:a|aa|aaa)+$", "", pattern=True)
    assert time.monotonic() - began < 120.0  # without a limit it would take longer than the world has stood


def test_tags_are_sorted_into_the_places_of_tags() -> None:
    captions = ("dog ,  Cat,ant\n", "cow, dog", None)
    assert after(bulk.sort_tags(pictures(*captions), "alphabet"), *captions) == ["ant ,  Cat,dog\n", "cow, dog", None]
    assert after(bulk.sort_tags(pictures(*captions), "frequency"), *captions) == ["dog ,  ant,Cat\n", "dog, cow", None]
    given_order = bulk.sort_tags(pictures(*captions), ["ant", "dog"])
    assert after(given_order, *captions) == ["ant ,  dog,Cat\n", "dog, cow", None]
    kept = bulk.sort_tags(pictures("z, c, b"), "alphabet", keep=1)
    assert after(kept, "z, c, b") == ["z, b, c"]


@pytest.mark.parametrize(
    ("function", "caption", "options", "expected"),
    [
        (bulk.remove_repeated, "a, b, a , b,c\n", (), "a, b, c\n"),
        (bulk.underscores_to_spaces, "red_hat, ^_^, O_O , a__b", (), "red hat, ^_^, O_O , a  b"),
        (bulk.underscores_to_spaces, "(O)_(o), ;_;, 1_girl, >_>", (), "(O)_(o), ;_;, 1 girl, >_>"),
        (bulk.spaces_to_underscores, " red hat,  dog ", (), " red_hat,  dog "),
        (bulk.tidy, " a ,, b  c ,\nd \n", (), "a, b c, d"),
        (bulk.tidy, " a ,, b\n\n c \n", ("variants",), "a, b\nc"),
        (bulk.add_tags, "one\r\n\r\ntwo, x\r\n", (["x"], None, "variants"), "one, x\r\n\r\ntwo, x\r\n"),
    ],
    ids=[
        "repeated tags are removed",
        "underscores become spaces",
        "the underscores of emoticons stay",
        "spaces become underscores",
        "commas and spaces are tidied",
        "each alternative is tidied by itself",
        "each alternative gets a tag of its own",
    ],
)
def test_captions_are_changed(
    function: Callable[..., Edit], caption: str, options: tuple[object, ...], expected: str
) -> None:
    assert done(function, caption, *options) == expected


def test_one_caption_is_set_for_all() -> None:
    assert after(bulk.set_caption(pictures("a", None, "q"), "q"), "a", None, "q") == ["q", "q", "q"]


def test_an_edit_says_what_it_does_and_to_how_many() -> None:
    assert bulk.rename_tag(pictures("a", "b", "a"), "a", "{}").name == "Rename a to {} in 2 captions"
    assert bulk.add_tags(pictures("a"), ["x", "y"]).name == "Add x, y to 1 caption"
    assert bulk.remove_tags(pictures("a"), list("abcd")).name == "Remove 4 tags from 1 caption"


tags = st.text(st.sampled_from("ab _()\\é,\n "), max_size=12)


@given(st.lists(st.one_of(st.none(), tags), max_size=5), st.sampled_from(["caption", "variants"]))
def test_what_is_asked_is_so_afterwards_and_the_inverse_brings_all_back(captions: list[str | None], lines: str) -> None:
    def tags_after(edit: Edit) -> list[list[str]]:
        restored = {change.image: change.after for change in edit.inverse().changes}
        assert restored == {change.image: captions[change.image] for change in edit.changes}
        return [split_tags(text, lines) for text in after(edit, *captions)]  # type: ignore[arg-type]

    before = [split_tags(text, lines) for text in captions]  # type: ignore[arg-type]
    shown = pictures(*captions)
    assert tags_after(bulk.remove_tags(shown, ["a"], lines)) == [[t for t in one if t != "a"] for one in before]
    assert [sorted(one) for one in tags_after(bulk.sort_tags(shown, "alphabet", 0, lines))] == [
        sorted(one) for one in before
    ]
    for was, now in zip(before, tags_after(bulk.rename_tag(shown, "a", "é", lines)), strict=True):
        assert "a" not in now and ("é" in now) == ("é" in was or "a" in was)
    if lines == "caption":
        assert tags_after(bulk.remove_repeated(shown)) == [list(dict.fromkeys(one)) for one in before]
        assert all("new" in one for one in tags_after(bulk.add_tags(shown, ["new"], 1)))
