"""Filters kept between sessions, and what happens to a file that cannot be understood."""

import os
import threading
from pathlib import Path

import pytest

from app.core.query.filtering import SavedFilter, SavedFilters
from trainer.protocol import files

CATS = Path("data") / "cats é"
SMALL = SavedFilter("Small", "size:<512")
REDO = SavedFilter("again", 'caption:"red"', CATS)


def kept_now(path: Path | None = None) -> SavedFilters:
    return SavedFilters(lambda work: work(), path)


def test_filters_are_there_at_the_next_start(per_user_folder):
    kept = kept_now()
    news = []
    kept.changed.connect(news.append)
    for one in (SMALL, REDO, SavedFilter("Small", "size:<768")):
        kept.save(one)
    kept.remember("tag:cat")
    kept.file.settle()
    again = kept_now()
    assert (per_user_folder / "filters.json").is_file()
    assert again.of(CATS) == [REDO, SavedFilter("Small", "size:<768")]
    assert again.of() == again.of(Path("other")) == [SavedFilter("Small", "size:<768")]
    assert again.recent == ("tag:cat",)
    assert (again.file.notice, len(news)) == ("", 4)
    again.remove(REDO)
    again.file.settle()
    assert kept_now().of(CATS) == [SavedFilter("Small", "size:<768")]


def test_the_last_queries_are_remembered_once_each():
    kept = kept_now()
    for number in [*range(40), 39, 38, 20]:
        kept.remember(f"tags:{number}")
    kept.remember("  ")
    kept.file.settle()
    assert kept_now().recent[:4] == ("tags:20", "tags:38", "tags:39", "tags:37")
    assert len(kept.recent) == 30


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"filters": [{"name": 1, "query": ""}], "recent": []}', '{"filters": 3, "recent": []}', b"\xff"],
)
def test_a_damaged_file_is_renamed_aside_and_said(per_user_folder, text):
    data = text if isinstance(text, bytes) else text.encode()
    path = per_user_folder / "filters.json"
    path.write_bytes(data)
    (per_user_folder / "filters.damaged.json").write_text("older", encoding="utf-8")
    kept = kept_now()
    assert kept.of() == []
    assert "filters.json" in kept.file.notice
    assert "filters.damaged-2.json" in kept.file.notice
    assert (per_user_folder / "filters.damaged-2.json").read_bytes() == data
    kept.save(SMALL)
    kept.file.settle()
    assert kept_now().of() == [SMALL]
    assert kept_now().file.notice == ""


def test_what_cannot_be_written_is_there_until_the_app_ends_and_that_is_said(per_user_folder):
    kept, told = kept_now(per_user_folder / "a file" / "filters.json"), []
    kept.file.failed.connect(told.append)
    (per_user_folder / "a file").write_text("in the way", encoding="utf-8")
    kept.save(SMALL)
    kept.file.settle()
    assert [error.code for error in told] == ["filters.unwritable"]
    assert os.fspath(per_user_folder) in told[0].sentence
    assert kept.of() == [SMALL]
    (per_user_folder / "a file").unlink()
    kept.file.settle()  # the app ends, and nothing was changed since
    assert kept_now(kept.file.path).of() == [SMALL] and len(told) == 1


def test_nobody_waits_for_the_disk(monkeypatch):
    awake, write = threading.Event(), files.write_text

    def sleepy(path: Path, text: str, *, durable: bool = True) -> None:
        assert awake.wait(60)
        write(path, text, durable=durable)

    monkeypatch.setattr(files, "write_text", sleepy)
    kept = kept_now()
    kept.save(SMALL)
    assert kept.of() == [SMALL] and not kept.file.path.exists()
    awake.set()
    kept.file.settle()
    assert kept_now().of() == [SMALL]
