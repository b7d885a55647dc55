"""What is proposed at the cursor of a query, and where it is put."""

from pathlib import Path

import pytest

from app.core.library import Folder, Library
from app.core.query.completion import QueryCompleter
from app.core.query.language import KEYS, parse
from app.core.tags.index import TagIndex

ROOT = Path("Cats")


@pytest.fixture
def completer():
    library = Library()
    captions = ["red hat, cat", "red hat", "a*b", r"miku \(v\)"]
    library.add((Folder(ROOT / f"s {n}", ROOT), "1.png", {"caption": text}) for n, text in enumerate(captions))
    return QueryCompleter(library, TagIndex(library))


@pytest.mark.parametrize(
    ("text", "proposed"),
    [
        ("ra|", ["ratio:", "rating:"]),
        ("tag:r|", ['tag:"red hat"']),
        ('tag:"red h|', ['tag:"red hat"']),
        ("-tag:r|", ['tag:"red hat"']),
        ("(tag:r|)", ['tag:"red hat"']),
        ("tag:mi|", [r'tag:"miku \\(v\\)"']),
        ("tag:a|", [r'tag:"a\\*b"']),
        ("ca| dog", ["caption:", "tag:cat"]),
        ("missing:r|", ["missing:rating", "missing:crop"]),
        ("mask:|", ["mask:", "mask:no"]),
        ("size:|", ["size:<", "size:<=", "size:>", "size:>="]),
        ("size:5|", []),
        ("folder:|", ['folder:"Cats/s 0"', 'folder:"Cats/s 1"', 'folder:"Cats/s 2"', 'folder:"Cats/s 3"']),
        ("folder:S\\ 1|", ['folder:"Cats/s 1"']),
        ("colour:r|", []),
        ("|", [f"{key}:" for key in KEYS]),
        ("tag:cat |", [f"{key}:" for key in KEYS]),
        ("tag:cat|", ["tag:cat"]),
    ],
)
def test_what_is_proposed(completer, text, proposed):
    cursor = text.index("|")
    text = text.replace("|", "")
    assert [proposal.text for proposal in completer.propose(text, cursor)] == proposed
    for proposal in completer.propose(text, cursor):
        changed, place = proposal.apply_to(text)
        assert changed.startswith(text[: proposal.start] + proposal.text)
        assert changed.endswith(text[proposal.end :])
        assert changed[:place].rstrip().endswith(proposal.text)


def test_a_value_that_is_complete_is_followed_by_a_space(completer):
    (proposal,) = completer.propose("-tag:r mask:", 6)
    assert proposal.apply_to("-tag:r mask:") == ('-tag:"red hat" mask:', 14)
    (proposal,) = completer.propose("tag:r", 5)
    assert proposal.apply_to("tag:r") == ('tag:"red hat" ', 14)
    assert proposal.images == 2
    assert completer.propose("rati", 4)[0].apply_to("rati") == ("ratio:", 6)


def test_proposed_tags_are_queries_for_these_tags(completer):
    for typed, tag in [("tag:a", "a\\*b"), ("tag:mi", "miku \\(v\\)")]:
        (proposal,) = completer.propose(typed, len(typed))
        assert parse(proposal.text).root.value == tag
