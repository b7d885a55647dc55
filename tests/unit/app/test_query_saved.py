"""Filters kept between sessions, and what happens to a file that cannot be understood."""

import os
from pathlib import Path

import pytest

from app.core.query.saved import SavedFilter, SavedFilters
from trainer.errors import ImpastoError

CATS = Path("data") / "cats é"
SMALL = SavedFilter("Small", "size:<512")
REDO = SavedFilter("again", 'caption:"red"', CATS)


def test_filters_are_there_at_the_next_start(per_user_folder):
    kept = SavedFilters()
    news = []
    kept.changed.connect(news.append)
    for one in (SMALL, REDO, SavedFilter("Small", "size:<768")):
        kept.save(one)
    kept.remember("tag:cat")
    again = SavedFilters()
    assert (per_user_folder / "filters.json").is_file()
    assert again.of(CATS) == [REDO, SavedFilter("Small", "size:<768")]
    assert again.of() == again.of(Path("other")) == [SavedFilter("Small", "size:<768")]
    assert again.recent == ("tag:cat",)
    assert (again.notice, len(news)) == (None, 4)
    again.remove(REDO)
    assert SavedFilters().of(CATS) == [SavedFilter("Small", "size:<768")]


def test_the_last_queries_are_remembered_once_each():
    kept = SavedFilters()
    for number in [*range(40), 39, 38, 20]:
        kept.remember(f"tags:{number}")
    kept.remember("  ")
    assert SavedFilters().recent[:4] == ("tags:20", "tags:38", "tags:39", "tags:37")
    assert len(kept.recent) == 30


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"filters": [{"name": 1, "query": ""}], "recent": []}', '{"filters": 3, "recent": []}', b"\xff"],
)
def test_a_damaged_file_is_renamed_aside_and_said(per_user_folder, text):
    data = text if isinstance(text, bytes) else text.encode()
    path = per_user_folder / "filters.json"
    path.write_bytes(data)
    (per_user_folder / "filters-damaged-1.json").write_text("older", encoding="utf-8")
    kept = SavedFilters()
    assert kept.of() == []
    assert kept.notice.code == "filters.damaged"
    assert "filters-damaged-2.json" in kept.notice.remedy
    assert (per_user_folder / "filters-damaged-2.json").read_bytes() == data
    kept.save(SMALL)
    assert SavedFilters().of() == [SMALL]
    assert SavedFilters().notice is None


def test_what_cannot_be_written_is_said_and_nothing_changes(per_user_folder):
    kept = SavedFilters(per_user_folder / "a file" / "filters.json")
    (per_user_folder / "a file").write_text("in the way", encoding="utf-8")
    with pytest.raises(ImpastoError) as caught:
        kept.save(SMALL)
    assert caught.value.code == "filters.unwritable"
    assert os.fspath(per_user_folder) in caught.value.sentence
    assert kept.of() == []
