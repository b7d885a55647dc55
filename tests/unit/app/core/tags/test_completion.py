"""Tag lists read from real files, and what is proposed from them and from the dataset's own tags."""

import queue
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.library import Folder, Library, ValueChange
from app.core.tags.completion import (
    Completer,
    Completion,
    Match,
    Style,
    TagList,
    Vocabulary,
    Word,
    lists_folder,
    read_list,
    read_lists,
    style_of,
)
from app.core.tags.index import TagIndex
from app.core.tasks import Tasks
from trainer.errors import ImpastoError

FOLDER = Folder(Path("data"), Path("data"))


def written(tmp_path, name, data):
    path = tmp_path / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def test_lists_of_the_boorus_are_read(tmp_path):
    path = written(
        tmp_path,
        "danbooru é.csv",
        '1girl,0,6008644,"1girls,sole_female"\nhatsune_miku,4,120000,"/miku,初音ミク"\n"a ""b""",0,5,\nsolo\n',
    )
    assert read_list(path).words == (
        Word("1girl", 6008644, 0, ("1girls", "sole_female")),
        Word("hatsune_miku", 120000, 4, ("miku", "初音ミク")),
        Word('a "b"', 5, 0),
        Word("solo"),
    )
    assert read_list(path).fault() is None


def test_titles_blank_lines_and_windows_line_ends_are_no_tags(tmp_path):
    assert read_list(written(tmp_path, "a.csv", "name,category,count,aliases\r\n\r\ncat,0,3,\r\n")).words == (
        Word("cat", 3, 0),
    )
    assert read_list(written(tmp_path, "a.txt", "cat\n\n red hat \n")).words == (Word("cat"), Word("red hat"))


def test_bad_lines_are_counted_and_the_others_used(tmp_path):
    lines = [
        "cat,0,3",
        'dog,0,4,"unclosed',
        ",0,3",
        "bird,zero,1",
        "fish,0,-1",
        "x" * 301,
        "\x07bell,0,1",
        "cow,0,²",
        "ok,1,2",
    ]
    found = read_list(written(tmp_path, "bad.csv", "\n".join(lines)))
    assert [word.name for word in found.words] == ["cat", "ok"]
    assert (found.bad_lines, found.first_bad) == (7, 2)
    assert found.fault() == "Skipped 7 lines of bad.csv without a usable tag; the first is line 2."


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_encodings_are_recognised(tmp_path, encoding):
    assert read_list(written(tmp_path, "a.txt", "café\nnaïve\n".encode(encoding))).words == (
        Word("café"),
        Word("naïve"),
    )


def test_what_is_no_list_is_refused_and_the_others_are_read(tmp_path):
    written(tmp_path, "a.txt", "cat\n")
    written(tmp_path, "b.csv", b"PK\x03\x04\0\0")
    written(tmp_path, "c.md", "no list")
    (tmp_path / "d.csv").mkdir()
    with written(tmp_path, "e.csv", "").open("wb") as file:
        file.truncate(64 * 2**20 + 1)
    lists, faults = read_lists(tmp_path)
    assert [one.path.name for one in lists] == ["a.txt"]
    assert [error.code for error in faults] == ["tags.list_unreadable"] * 3
    assert "not a text file" in faults[0].sentence
    assert "larger than 64 MiB" in faults[2].sentence
    assert read_lists(tmp_path / "nowhere") == ([], [])
    with pytest.raises(ImpastoError):
        read_list(tmp_path / "gone.csv")


def test_lists_lie_in_the_per_user_folder(per_user_folder):
    assert lists_folder() == per_user_folder / "tags"


def vocabulary(*words):
    return Vocabulary([TagList(Path("a.csv"), words)])


def test_the_same_tag_of_two_lists_is_one():
    first = TagList(Path("a"), (Word("cat", 5, 0, ("kitty",)), Word("dog", 9)))
    second = TagList(Path("b"), (Word("cat", 50, 7, ("feline", "kitty")),))
    assert Vocabulary([first, second]).words == [Word("cat", 50, 7, ("feline", "kitty")), Word("dog", 9)]


NAMES = st.text(st.sampled_from("aAb_ (\\"), min_size=1, max_size=5).map(str.strip).filter(bool)
WORDS = st.lists(
    st.builds(Word, NAMES, st.integers(0, 9), st.none(), st.lists(NAMES, max_size=2).map(tuple)),
    max_size=9,
    unique_by=lambda word: word.name,
)


def key(text):
    return text.casefold().replace(r"\(", "(").replace(r"\)", ")").replace("_", " ")


@settings(max_examples=60)
@given(WORDS, NAMES)
def test_popular_beginnings_come_first_then_what_holds_the_text(words, typed):
    by_count = sorted(words, key=lambda word: -word.count)
    names = {word.name: [key(name) for name in (word.name, *word.aliases)] for word in words}
    first = [word for word in by_count if any(name.startswith(key(typed)) for name in names[word.name])]
    further = [w for w in by_count if w not in first and any(key(typed) in name for name in names[w.name])]
    found = vocabulary(*words).complete(typed, 100)
    assert [match.word for match in found] == first + (further if len(key(typed)) > 1 else [])
    for match in found:
        assert key(typed) in key(match.alias or match.word.name)
        assert match.alias is None or match.alias in match.word.aliases


def test_as_many_words_as_wanted_though_each_has_many_names():
    many = [Word(f"word {n}", 100 - n, 0, tuple(f"word {n} {m}" for m in range(20))) for n in range(30)]
    found = vocabulary(Word("a word", 999), *many).complete("word", 5)
    assert [match.word.name for match in found] == [f"word {n}" for n in range(5)]


def test_an_alias_leads_to_its_tag():
    found = vocabulary(Word("1girl", 6, 0, ("sole_female",)), Word("sole", 1))
    assert found.complete("sole f") == [Match(Word("1girl", 6, 0, ("sole_female",)), "sole_female")]
    assert found.complete("") == []


def completer(captions, *words):
    library = Library()
    library.add((FOLDER, f"{number:03}.png", {"caption": caption}) for number, caption in enumerate(captions))
    return library, Completer(TagIndex(library), vocabulary(*words))


def test_own_tags_come_first_by_frequency_then_the_lists():
    _, one = completer(["cat ears", "cat ears, cat"], Word("cat_girl", 900, 0), Word("cat", 10), Word("bobcat", 99))
    assert one.complete("cat") == [
        Completion("cat ears", 2),
        Completion("cat", 1),
        Completion("cat girl", 0, 900, 0),
        Completion("bobcat", 0, 99),
    ]
    assert one.complete("cat", 2, exclude=["cat ears"]) == [Completion("cat", 1), Completion("cat girl", 0, 900, 0)]
    assert one.complete("  ") == []


def test_an_own_tag_is_found_by_an_alias_of_a_list():
    _, one = completer(["1girl"] * 3, Word("1girl", 6, 0, ("sole_female",)))
    assert one.complete("sole") == [Completion("1girl", 3, 6, 0, "sole_female")]


def test_proposals_are_written_as_the_dataset_writes():
    library, one = completer(["red_hat, blue_hat, a b"], Word("long hair", 5), Word("miku_(vocaloid)", 4))
    assert one.style == Style(underscores=True)
    assert [proposal.tag for proposal in one.complete("long")] == ["long_hair"]
    assert [proposal.tag for proposal in one.complete("red h")] == ["red_hat"]
    library.apply([ValueChange(1, "caption", "", r"red hat, blue hat, rin \(vocaloid\)")])
    assert one.style == Style(escapes=True)
    assert [proposal.tag for proposal in one.complete("long_")] == ["long hair"]
    assert [proposal.tag for proposal in one.complete("miku (")] == [r"miku \(vocaloid\)"]


@pytest.mark.parametrize("face", ["^_^", ">_<", "o_o", "0_0", "(o)_(o)", "||_||", "._."])
def test_emoticons_keep_their_underscore(face):
    assert Style().write(face).replace("\\", "") == face
    assert style_of([face, "red hat"]) == Style()


def test_a_tag_of_short_words_is_no_emoticon():
    assert Style().write("no_bra") == "no bra"
    assert Style(underscores=True).write("big cat") == "big_cat"


def test_lists_are_loaded_by_a_worker_when_first_needed(tmp_path):
    written(tmp_path, "a.csv", "long_hair,0,5\n,bad\n")
    written(tmp_path, "b.csv", b"\0")
    _, one = completer(["cat"])
    said = []
    one.loaded.connect(said.append)
    calls = queue.Queue()
    tasks = Tasks(calls.put)
    one.load_when_requested(tasks, tmp_path)
    assert (one.complete("lo"), one.complete("lo")) == ([], [])
    calls.get(timeout=120)()
    tasks.close()
    assert [proposal.tag for proposal in one.complete("lo")] == ["long hair"]
    assert calls.empty()
    ((unreadable, bad),) = said
    assert "b.csv" in unreadable
    assert bad == "Skipped line 2 of a.csv: it has no usable tag."
