"""The finder beside a plain evaluation of every condition picture by picture, and what it says while it counts."""

import queue
import re
import unicodedata
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.library import Folder, Library, ValueChange
from app.core.query import finder as lengths
from app.core.query import tokens
from app.core.query.finder import Finder, PendingCount
from app.core.query.language import QueryError, parse
from app.core.query.terms import And, Not, Or, Query, Range, Term
from app.core.query.tokens import TokenCounts
from app.core.tags.index import TagIndex
from app.core.tasks import Tasks
from trainer.files.tokens import ClipTokens

ROOT = Path("Cats é")
FOLDERS = [Folder(ROOT, ROOT), Folder(ROOT / "Sub", ROOT), Folder(ROOT / "Sub" / "deep", ROOT)]
WORDS = ["cat", "Cat", "red hat", "red_hat", r"miku \(vocaloid\)", "a*b", "ab", "", "two\nlines"]
CAPTION = st.none() | st.lists(st.sampled_from(WORDS), max_size=4).map(", ".join)
KNOWN = st.fixed_dictionaries(
    {
        "caption": CAPTION,
        "width": st.sampled_from([None, 300, 512, 768]),
        "height": st.sampled_from([300, 512, 1024]),
        "rating": st.sampled_from([None, 0, 3, 5]),
        "excluded": st.booleans(),
        "crop": st.sampled_from([None, (0.0, 0.0, 0.5, 0.5)]),
        "mask": st.booleans(),
        "problem": st.sampled_from([None, "It is damaged."]),
        "content": st.sampled_from([None, "x", "y", "z"]),
    }
)
NAMES = st.sampled_from(["IMG_1.png", "cat (2).jpg", "red hat.png", "b.webp"])
PICTURES = st.lists(st.tuples(st.sampled_from(FOLDERS), NAMES, KNOWN), max_size=8)
KINDS = ("caption", "rating", "excluded", "crop", "size", "file", "problem", "mask", "inspection")
FINDINGS = {"duplicates.near": [1], "caption.long": [2, 99]}
CLIP = ClipTokens()


def plain(text):
    """Small letters, escaped parentheses as plain ones, one line."""
    lines = [line.strip() for line in text.splitlines()]
    return " ".join(line for line in lines if line).casefold().replace(r"\(", "(").replace(r"\)", ")")


def tags_of(caption):
    return {part.strip() for part in plain(caption or "").split(",")} - {""}


def tag_fits(pattern, tag):
    """Match by fnmatch's own rule, with its brackets disabled and our escapes translated."""
    pattern = plain(pattern).replace("[", "[[]")
    return fnmatchcase(tag, pattern.replace(r"\*", "[*]").replace(r"\?", "[?]"))


def path_of(picture):
    return f"{picture.folder.path.as_posix()}/{picture.name}".casefold()


def naive_text(term, p, others):
    text = str(term.value)
    caption = plain(p.caption or "")
    return {
        "": lambda: plain(text) in caption or text.casefold() in p.name.casefold(),
        "tag": lambda: any(tag_fits(text, tag) for tag in tags_of(p.caption)),
        "caption": lambda: plain(text) in caption,
        "name": lambda: text.casefold() in p.name.casefold(),
        "folder": lambda: text.casefold() in p.folder.path.as_posix().casefold(),
        "path": lambda: text.casefold() in path_of(p),
        "problem": lambda: (
            (p.problem is not None and text.casefold() in p.problem.casefold())
            or any(text.casefold() in code and p.id in ids for code, ids in FINDINGS.items())
        ),
        "missing": lambda: {
            "caption": not (p.caption or "").strip(),
            "rating": p.rating is None,
            "crop": p.crop is None,
            "mask": not p.mask,
            "size": p.width is None,
        }[text],
    }[term.key]()


def naive_number(key, p):
    sized = p.width is not None
    return {
        "size": min(p.width, p.height) if sized else None,
        "width": p.width,
        "height": p.height,
        "ratio": p.width / p.height if sized else None,
        "tags": len({tag.strip() for tag in " ".join((p.caption or "").splitlines()).split(",")} - {""}),
        "chars": len(p.caption or ""),
        "tokens": CLIP.count(plain(p.caption or "")) if p.caption else 0,
        "rating": p.rating,
    }[key]


def naive(node, p, others):
    """Whether one picture is found, straight from the words of the help."""
    if isinstance(node, Not):
        return not naive(node.part, p, others)
    if isinstance(node, And | Or):
        return (all if isinstance(node, And) else any)([naive(part, p, others) for part in node.parts])
    if isinstance(node.value, Range):
        number, low, high = naive_number(node.key, p), node.value.low, node.value.high
        if number is None:
            return False
        if node.key == "ratio" and low == high:
            return abs(number - low) <= 0.005
        return low < number < high if node.value.open else low <= number <= high
    if isinstance(node.value, bool):
        copies = [other for other in others if other is not p and p.content and other.content == p.content]
        doubled = bool(copies) or p.id in FINDINGS["duplicates.near"]
        has = {"dup": doubled, "mask": p.mask, "excluded": p.excluded, "crop": p.crop is not None}
        return has[node.key] == node.value
    return naive_text(node, p, others)


TEXT = st.sampled_from(["cat", "red", "red hat", "HAT", "a*b", "t, r", "hat, cat", "miku (v", "1", "two lines", "s e"])
PATTERN = st.sampled_from(["cat", "c*", "red?hat", r"a\*b", "a*b", "*", "*(voc*", "???", r"MIKU \(vocaloid\)"])
WAY = st.sampled_from(["cats", "sub", "Sub/", "sub/img", "é/sub/d", "/", "img_1.png", "deep/b", "s é/c"])
NUMBER = st.sampled_from([0, 1, 2, 3, 5, 10, 300, 512, 768])
RANGE = st.one_of(
    st.builds(lambda n, is_open: Range(low=n, open=is_open), NUMBER, st.booleans()),
    st.builds(lambda n, is_open: Range(high=n, open=is_open), NUMBER, st.booleans()),
    st.tuples(NUMBER, NUMBER).map(sorted).map(lambda pair: Range(*pair)),
)
TERM = st.one_of(
    st.builds(Term, st.sampled_from(["", "caption", "name"]), TEXT),
    st.builds(Term, st.just("tag"), PATTERN),
    st.builds(Term, st.sampled_from(["folder", "path"]), WAY),
    st.builds(Term, st.sampled_from(["size", "width", "height", "ratio", "tags", "chars", "tokens", "rating"]), RANGE),
    st.builds(Term, st.just("ratio"), st.sampled_from([1, 1.71, 0.5]).map(lambda n: Range(n, n))),
    st.builds(Term, st.just("missing"), st.sampled_from(["caption", "rating", "crop", "mask", "size"])),
    st.builds(Term, st.just("problem"), st.sampled_from(["", "damaged", "near", "caption"])),
    st.builds(Term, st.sampled_from(["dup", "mask", "crop", "excluded"]), st.booleans()),
)
NODE = st.recursive(
    TERM,
    lambda inner: st.one_of(
        inner.map(Not),
        st.lists(inner, min_size=2, max_size=3).map(tuple).map(And),
        st.lists(inner, min_size=2, max_size=3).map(tuple).map(Or),
    ),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def home():
    calls = queue.Queue()
    tasks = Tasks(calls.put)
    yield calls, tasks
    tasks.close()


def finder_over(found, tasks):
    library = Library()
    # A name twice in one folder would be one file.
    different = {(folder.path, name): (folder, name, known) for folder, name, known in found}
    library.add(different.values())
    return library, Finder(library, TagIndex(library), tasks, lambda: FINDINGS)


def ask(finder, query, calls):
    """Find, once nothing is left to be counted."""
    left = []
    stop = finder.result_changed.connect(lambda counting: left.append(counting.pending))
    finder.find(query)
    while finder.pending:
        calls.get(timeout=120)()
    stop()
    return finder.find(query)


def expected(root, library):
    everyone = list(library.images.values())
    return [p.id for p in everyone if naive(root, p, everyone)]


@settings(max_examples=200)
@given(PICTURES, NODE, st.lists(st.tuples(st.integers(0, 7), KNOWN), max_size=2), st.integers(0, 7))
def test_the_finder_finds_what_a_plain_evaluation_finds(home, found, root, learned, gone):
    calls, tasks = home
    library, finder = finder_over(found, tasks)
    assert ask(finder, Query(root), calls) == expected(root, library)
    ids = list(library.images)
    facts = {ids[place]: known for place, known in learned if place < len(ids)}
    library.set_facts(facts, *KINDS)
    library.remove(ids[gone : gone + 1])
    assert ask(finder, Query(root), calls) == expected(root, library)


def test_all_pictures_are_found_in_the_order_of_the_library(home):
    library, finder = finder_over([(FOLDERS[0], f"{n}.png", {"caption": "cat"}) for n in (10, 9, 1)], home[1])
    assert [library.images[number].name for number in finder.find("")] == ["1.png", "9.png", "10.png"]
    assert finder.find("tag:cat") == finder.find("") == list(library.images)


def test_a_text_that_is_no_query_is_refused(home):
    _, finder = finder_over([], home[1])
    with pytest.raises(QueryError):
        finder.find("(")


def test_token_counts_come_behind_and_are_kept():
    calls = queue.Queue()
    tasks = Tasks(calls.put)
    library, finder = finder_over(
        [(FOLDERS[0], f"{n}.png", {"caption": f"number {n}, " + "cat " * (n % 90)}) for n in range(600)], tasks
    )
    news = []
    finder.result_changed.connect(news.append)
    assert finder.find("tokens:>75") == []
    assert finder.pending == 600
    while finder.pending:
        calls.get(timeout=120)()
    tasks.close()  # whoever asks again gets the answer without a worker
    assert news == [PendingCount("tokens", 100), PendingCount("tokens", 0)]
    assert finder.find("tokens:>75") == expected(parse("tokens:>75").root, library)
    library.apply([ValueChange(1, "caption", library.images[1].caption, library.images[2].caption)])
    assert finder.find("tokens:>75") == expected(parse("tokens:>75").root, library)


def test_captions_are_looked_at_and_counted_in_portions(home, monkeypatch):
    """All in one go held up the window for 60 ms at 100,000 pictures."""
    monkeypatch.setattr(lengths, "_MAX_EXAMINED", 3)
    monkeypatch.setattr(lengths, "_MAX_REQUESTED", 2)
    library, finder = finder_over(
        [(FOLDERS[0], f"{n}.png", {"caption": "cat " * n}) for n in (0, 0, *range(9))], home[1]
    )
    looked, wanted = [], []
    of, want = TokenCounts.count, TokenCounts.request

    def count(counts, caption):
        looked[-1] += 1
        return of(counts, caption)

    def want_noted(counts, captions):
        wanted.append(len(captions := list(captions)))
        want(counts, captions)

    def look_noted(self):
        looked.append(0)
        look(self)

    look = lengths.TokenColumn._request_unknown
    monkeypatch.setattr(TokenCounts, "count", count)
    monkeypatch.setattr(TokenCounts, "request", want_noted)
    monkeypatch.setattr(lengths.TokenColumn, "_request_unknown", look_noted)
    assert ask(finder, "tokens:>3", home[0]) == expected(parse("tokens:>3").root, library)
    assert max(looked) <= 6 and max(wanted) == 2 and finder.pending == 0
    looked.clear()
    without, over_those = finder_over([(FOLDERS[0], f"{n}.png", {}) for n in range(9)], home[1])
    assert ask(over_those, "tokens:0", home[0]) == list(without.images)
    assert max(looked) <= 3
    library.apply([ValueChange(3, "caption", library.images[3].caption, "one of many words")])
    assert 3 not in finder.find("tokens:0..3")  # what it had before is no answer any more
    assert ask(finder, "tokens:4", home[0])[0] == 3


def test_counting_that_fails_is_given_up_and_told(monkeypatch):
    def fail(texts):
        raise OSError("no vocabulary")

    monkeypatch.setattr(tokens, "count_tokens", fail)
    calls = queue.Queue()
    tasks = Tasks(calls.put)
    _, finder = finder_over([(FOLDERS[0], "1.png", {"caption": "never counted before"})], tasks)
    assert finder.find("tokens:>1") == [] and finder.pending == 1
    with pytest.raises(OSError, match="no vocabulary"):
        calls.get(timeout=120)()
    tasks.close()
    assert finder.pending == 0 and finder.find("tokens:>1") == []


def test_counting_that_failed_once_is_tried_again_and_what_fails_twice_in_a_row_is_not(monkeypatch):
    monkeypatch.setattr(lengths, "_MAX_REQUESTED", 2)
    tried, faults, broken = [], [], {1, 4, 5}
    count = tokens.count_tokens

    def sometimes(texts):
        tried.append(texts)
        if len(tried) in broken:
            raise OSError("the disk did not answer")
        return count(texts)

    monkeypatch.setattr(tokens, "count_tokens", sometimes)
    calls = queue.Queue()
    tasks = Tasks(calls.put)
    captions = [f"a caption of number {number}" for number in range(5)]
    library, finder = finder_over(
        [(FOLDERS[0], f"{number}.png", {"caption": text}) for number, text in enumerate(captions)], tasks
    )
    news = []
    finder.result_changed.connect(lambda counting: news.append(counting.pending))
    found = finder.find("tokens:>1")
    while len(faults) < len(broken):
        try:
            calls.get(timeout=120)()
        except OSError as fault:
            faults.append(fault)
            assert news[-1] == 0
            found = finder.find("tokens:>1")  # as the filter does
    numbers = list(library.images)
    assert tried == [captions[:2], captions[2:4], [captions[4], captions[0]], [captions[1]], [captions[1]]]
    assert found == finder.find("tokens:>1") == [numbers[0], *numbers[2:]] and finder.pending == 0
    library.apply([ValueChange(numbers[1], "caption", captions[1], f"{captions[1]}, edited")])
    assert finder.find("tokens:>1") == [numbers[0], *numbers[2:]] and finder.pending == 1
    calls.get(timeout=120)()
    tasks.close()
    assert finder.find("tokens:>1") == numbers


def test_a_query_knows_which_changes_can_alter_its_answer():
    assert Finder.depends(parse("rating:3 -tag:cat")) == {"rating", "caption", "file"}
    assert Finder.depends(parse("name:x")) == set()
    assert Finder.depends(parse("")) == set()


def test_help_says_ways_with_the_separator_of_every_system(home):
    library, finder = finder_over([(FOLDERS[1], "a.png", {})], home[1])
    assert finder.find(r"path:sub\a") == finder.find("path:sub/a") == list(library.images)
    assert not re.search(r"\\", str(parse("path:sub/a")))


@pytest.mark.parametrize(
    "query", ["tag:thé", "tag:th*é", "caption:thé", "thé", "name:café", "CAFÉ", "folder:éte", "path:éte/café"]
)
@pytest.mark.parametrize(("stored", "typed"), [("NFD", "NFC"), ("NFC", "NFD")])
def test_an_accent_is_found_however_it_is_written(query, stored, typed):
    library = Library()
    folder = Folder(Path(unicodedata.normalize(stored, "éte")), Path(unicodedata.normalize(stored, "éte")))
    name, caption = (unicodedata.normalize(stored, text) for text in ("café.jpg", "thé, hat"))
    (number,) = library.add([(folder, name, {"caption": caption})])
    library.add([(Folder(ROOT, ROOT), "other.jpg", {"caption": "the, cafe"})])
    index = TagIndex(library)
    assert Finder(library, index, Tasks(lambda work: None)).find(unicodedata.normalize(typed, query)) == [number]
