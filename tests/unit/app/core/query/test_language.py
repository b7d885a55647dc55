"""Queries read and written again, what is said of wrong ones, and where."""

from math import isinf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.query.language import KEYS, MISSING, OPTIONAL, QueryError, help_text, parse
from app.core.query.terms import And, Not, Or, Query, Range, Term, literal
from trainer.errors import EXIT_BAD_INPUT

CAT, DOG, HAT = Term("tag", "cat"), Term("tag", "dog"), Term("", "hat")


@pytest.mark.parametrize(
    ("text", "root"),
    [
        ("", None),
        ("  \n ", None),
        ("hat", HAT),
        ('"red hat"', Term("", "red hat")),
        ("tag:cat", CAT),
        ("TAG:cat", CAT),
        ("tag:cat tag:dog", And((CAT, DOG))),
        ("tag:cat and tag:dog AND hat", And((CAT, DOG, HAT))),
        ("tag:cat or tag:dog hat", Or((CAT, And((DOG, HAT))))),
        ("(tag:cat or tag:dog) hat", And((Or((CAT, DOG)), HAT))),
        ("-tag:cat", Not(CAT)),
        ("not tag:cat hat", And((Not(CAT), HAT))),
        ("-(tag:cat tag:dog)", Not(And((CAT, DOG)))),
        ("--hat", Not(Not(HAT))),
        ("red-hat", Term("", "red-hat")),
        ('"-"', Term("", "-")),
        ("rating:>5", Term("rating", Range(low=5, open=True))),  # other programs' notes may know more stars
        ('"or"', Term("", "or")),
        ("tag:or", Term("tag", "or")),
        (r'caption:"say \"hi\" \\ there"', Term("caption", r'say "hi" \ there')),
        (r"tag:red\ hat", Term("tag", "red hat")),
        ("tag:miku_(vocaloid)", Term("tag", "miku_(vocaloid)")),
        (r'tag:"miku \(vocaloid\)"', Term("tag", r"miku \(vocaloid\)")),
        ("(tag:cat)", CAT),
        ("tag::d", Term("tag", ":d")),
        ("tag:>_<", Term("tag", ">_<")),
        (":d", Term("", ":d")),
        ("size:512", Term("size", Range(512, 512))),
        ("size:=512", Term("size", Range(512, 512))),
        ("size:<512", Term("size", Range(high=512, open=True))),
        ("size:>=512", Term("size", Range(low=512))),
        ("size:768..512", Term("size", Range(512, 768))),
        ("rating:<=6", Term("rating", Range(high=6))),
        ("rating:9..2", Term("rating", Range(2, 9))),
        ("ratio:>3:2", Term("ratio", Range(low=1.5, open=True))),
        ("ratio:0.5", Term("ratio", Range(0.5, 0.5))),
        ("dup:", Term("dup", True)),
        ("mask:no", Term("mask", False)),
        ("missing:Caption", Term("missing", "caption")),
        ("problem:", Term("problem", "")),
        ("problem:damaged", Term("problem", "damaged")),
    ],
)
def test_what_a_query_means(text, root):
    assert parse(text) == Query(root)


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("colour:red", [("colour:", 'no key "colour"')]),
        ("tags:many size:", [("tags:many", '"many" is not a number'), ("size:", "needs a number")]),
        ("tga:cat", [("tga:", 'Did you mean tag:? To search for this text, put "tga:cat" in quotes')]),
        ("missing:capton", [("missing:capton", "Did you mean missing:caption?")]),
        ("mask:maybe", [("mask:maybe", "yes or no")]),
        ("tag: cat", [("tag:", "needs text after it")]),
        ('tag:"red hat', [('"red hat', "not closed")]),
        ('tag:"red"hat', [("hat", "right after the quote")]),
        ("(tag:cat", [("(", "not closed")]),
        ("tag:cat)", [(")", "has no match")]),
        ("()", [("()", "parentheses are empty")]),
        ("cat or", [("or", 'missing after "or"')]),
        ("or cat", [("or", 'missing before "or"')]),
        ("cat or or dog", [("or", 'missing after "or"')]),
        ("cat and", [("and", 'missing after "and"')]),
        ("and cat", [("and", 'missing before "and"')]),
        ("not", [("not", 'missing after "not"')]),
        ("-and cat", [("-", 'missing after "minus"')]),
        ('""', [('""', "quotes are empty")]),
        ("-", [("-", "no condition after this minus sign")]),
        ("cat - dog", [("-", "no condition after this minus sign")]),
        ("rating:8", [("rating:8", '8 is too large: "rating:" goes up to 5')]),
        ("rating:9..7", [("rating:9..7", '7 is too large: "rating:" goes up to 5')]),
        ("rating:>=6 size:6", [("rating:>=6", '6 is too large: "rating:" goes up to 5')]),
        ("(x:1 or size:a) y:2)", [("x:", "key"), ("size:a", "number"), ("y:", "key"), (")", "has no match")]),
        ("(" * 60 + "cat" + ")" * 60, [("(", "Too many nested groups")]),
    ],
)
def test_everything_wrong_is_said_at_once_and_where(text, faults):
    with pytest.raises(QueryError) as caught:
        parse(text)
    error = caught.value
    said = [(text[fault.start : fault.end], f"{fault.sentence} {fault.remedy}") for fault in error.faults]
    assert [place for place, _ in said] == [place for place, _ in faults]
    for (_, words), (_, part) in zip(said, faults, strict=True):
        assert part in words
    assert (error.sentence, error.exit_code) == (error.faults[0].sentence, EXIT_BAD_INPUT)
    assert all(fault.remedy for fault in error.faults)


def test_a_word_that_is_wrong_in_itself_is_no_missing_word():
    with pytest.raises(QueryError) as caught:
        parse("size:x or colour:y and tags:z")
    assert [fault.start for fault in caught.value.faults] == [0, 10, 23]


NUMBERS = st.decimals(0, 10**6, places=2).map(float)
TEXTS = st.text(st.sampled_from('ab *?\\"():-<>.,_') | st.characters(codec="utf-8"), min_size=1).map(str.strip)
RANGES = st.one_of(
    NUMBERS.map(lambda n: Range(n, n)),
    st.builds(lambda n, is_open: Range(low=n, open=is_open), NUMBERS, st.booleans()),
    st.builds(lambda n, is_open: Range(high=n, open=is_open), NUMBERS, st.booleans()),
    st.tuples(NUMBERS, NUMBERS).map(sorted).map(lambda pair: Range(*pair)),
)


def term_of(key):
    few = st.sampled_from([Range(3.0, 5.0), Range(high=2.0, open=True), Range(low=5.0)])
    numbers = RANGES if isinf(key.maximum) else few
    values = {"text": TEXTS.filter(bool), "number": numbers, "flag": st.booleans(), "choice": st.sampled_from(MISSING)}
    value = values[key.kind] | st.just("") if key.name in OPTIONAL else values[key.kind]
    return value.map(lambda value: Term(key.name, value))


TERMS = st.one_of(TEXTS.filter(bool).map(lambda text: Term("", text)), *map(term_of, KEYS.values()))
NODES = st.recursive(
    TERMS,
    lambda inner: st.one_of(
        inner.map(Not),
        st.lists(inner, min_size=2, max_size=3).map(tuple).map(And),
        st.lists(inner, min_size=2, max_size=3).map(tuple).map(Or),
    ),
    max_leaves=5,
)


@settings(max_examples=60)
@given(NODES)
def test_what_is_written_is_read_as_it_was(root):
    query = Query(root)
    assert parse(str(query)) == query


@settings(max_examples=60)
@given(NODES)
def test_each_term_knows_where_it_stands(root):
    text = str(Query(root))
    for term in parse(text).terms():
        assert parse(text[slice(*term.span)]).root == term


SCRAPS = st.sampled_from([*'ab "()-:\\<>.5', "or ", "and ", "not ", "size:", "tag:"])


@settings(max_examples=60)
@given(st.lists(SCRAPS, max_size=20).map("".join))
def test_any_text_is_understood_or_refused_in_words(text):
    try:
        query = parse(text)
    except QueryError as error:
        for fault in error.faults:
            assert 0 <= fault.start < fault.end <= len(text)
            assert fault.sentence.endswith(".")
    else:
        assert parse(str(query)) == query


def test_a_tag_as_a_pattern_means_itself():
    assert literal("a*b?") == r"a\*b\?"


def test_the_help_shows_every_key_and_its_examples_are_understood():
    text = help_text()
    for key in KEYS.values():
        assert key.example in text
        assert key.sentence in text
        assert parse(key.example).root.key == key.name
    for example in ["tag:cat -tag:dog", "(tag:cat or tag:dog) and not missing:caption", 'tag:"miku (vocaloid)"']:
        assert example in text
        parse(example)
