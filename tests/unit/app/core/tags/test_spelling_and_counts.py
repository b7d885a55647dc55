"""What the caption editor stands on: differences of captions, summaries of many, snapshots, moved tags, token ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.edits.bulk import CanceledError, CaptionSnapshots, differences
from app.core.library import Folder, LibraryImage
from app.core.tags.index import summarize
from app.core.tags.splitting import find_tags, move_tag, split_tags
from trainer.files.tokens import ClipTokens

words = st.lists(st.sampled_from(["cat", "red hat", ",", ", ", "é", "\n", " ", "😀"]), max_size=12).map("".join)


def without(text, spans):
    for span in reversed(spans):
        text = text[: span.start] + text[span.end :]
    return text


@given(words, words)
def test_what_is_left_without_the_differences_is_the_same_in_both(before, after):
    found = differences(before, after)
    assert without(before, found.gone) == without(after, found.new)
    assert bool(found.gone or found.new) == (before != after)


def test_only_the_words_that_differ_are_differences():
    before, after = "1girl, red hat, dog", "1girl, blue hat, dog, owl"
    found = differences(before, after)
    assert [before[span.start : span.end] for span in found.gone] == ["red"]
    assert [after[span.start : span.end] for span in found.new] == ["blue", ", owl"]


def test_long_texts_are_compared_as_a_whole_between_what_they_share():
    before = "same, " + "a b " * 2000 + ", end"
    after = "same, " + "c d " * 2000 + ", end"
    (gone,), (new,) = differences(before, after)
    assert before[gone.start : gone.end] == ("a b " * 2000).rstrip()
    assert after[new.start : new.end] == ("c d " * 2000).rstrip()


@given(words, st.data())
def test_moving_a_tag_moves_nothing_but_tags(text, data):
    found = find_tags(text)
    if not found:
        return
    source = data.draw(st.integers(0, len(found) - 1))
    target = data.draw(st.integers(0, len(found) - 1))
    moved = move_tag(text, found, source, target)
    tags = [piece.tag for piece in found]
    tags.insert(target, tags.pop(source))
    assert [piece.tag for piece in find_tags(moved)] == tags
    assert sorted(moved) == sorted(text)
    assert move_tag(moved, find_tags(moved), target, source) == text


def test_the_others_close_up_when_a_tag_moves():
    text = "a,  b,c\n, d"
    assert move_tag(text, find_tags(text), 0, 2) == "b,  c,a\n, d"
    assert move_tag(text, find_tags(text), 3, 0) == "d,  a,b\n, c"


def test_what_begins_and_ends_alike_is_counted_once():
    assert differences("cat, cat", "cat").gone == ((3, 8),)
    assert differences("cat", "cat, cat").new == ((3, 8),)


def test_a_summary_tells_common_from_mixed_in_the_first_ones_order():
    captions = ["b, a, a", "a, c, b", None, "", "b, a"]
    summary = summarize(captions)
    assert (summary.captions, summary.missing, summary.empty) == (5, 1, 1)
    assert summary.common == ()
    assert [tuple(mixed) for mixed in summary.mixed] == [("b", 3), ("a", 3), ("c", 1)]
    assert summarize([captions[0], captions[1]]).common == ("b", "a")
    assert summarize([]).captions == 0


def test_a_snapshot_stays_as_it_was_and_ends_when_it_is_called_off(tmp_path):
    folder = Folder(tmp_path, tmp_path)
    pictures = [LibraryImage(number, folder, f"{number}.png", caption="a") for number in (1, 2)]
    snapshot = CaptionSnapshots(pictures)
    pictures[0].caption = "b"
    assert [tuple(words) for words in snapshot] == [(1, "a"), (2, "a")]
    assert snapshot[1].id == 2
    running = iter(snapshot)
    next(running)
    snapshot.cancel()
    with pytest.raises(CanceledError):
        next(running)


def test_tokens_end_where_the_text_that_counts_alone_gives_so_many():
    tokens = ClipTokens()
    text = "a Café, red\u00a0hat 😀, 12 猫\n\nend"
    ends = tokens.ends(text)
    assert len(ends) == tokens.count(text)
    assert ends == sorted(ends)
    assert ends[-1] == len(text)
    comma = text.index(",") + 1
    assert tokens.count(text[:comma]) == sum(end <= comma for end in ends)


def test_split_tags_is_what_pieces_are():
    text = "a, b b,,\n c"
    assert [piece.tag for piece in find_tags(text)] == split_tags(text)
