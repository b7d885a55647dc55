"""impasto.jsonl: read, changed, written; what others wrote into it stays."""

import json
from pathlib import Path

import pytest

from trainer.dataset.sidecar import FILE_NAME, Sidecar, read_sidecar, write_sidecar
from trainer.errors import DatasetError

LINES = """{"impasto": 1, "repeats": 3, "trigger": "zwx", "colour": "blue"}
{"file": "a.png", "excluded": true, "note": {"by": "Käthe"}}

{"file": "b.png", "rating": 4, "crop": [0, 0.25, 1, 0.75]}
"""


def folder_with(tmp_path: Path, text: str) -> Path:
    (tmp_path / FILE_NAME).write_text(text, encoding="utf-8", newline="\n")
    return tmp_path


def test_reading(tmp_path: Path) -> None:
    notes = read_sidecar(folder_with(tmp_path, LINES))
    assert (notes.folder.repeats, notes.folder.trigger, notes.folder.regularization) == (3, "zwx", False)
    assert notes.of("a.png").excluded
    assert notes.of("b.png").crop == (0.0, 0.25, 1.0, 0.75)
    assert (notes.of("c.png").excluded, notes.of("c.png").crop) == (False, None)


def test_no_file_and_an_empty_file_say_nothing(tmp_path: Path) -> None:
    assert read_sidecar(tmp_path) == Sidecar()
    assert read_sidecar(folder_with(tmp_path, "\n")) == Sidecar()


def test_a_file_without_a_first_line_for_the_folder(tmp_path: Path) -> None:
    notes = read_sidecar(folder_with(tmp_path, '\ufeff{"file": "a.png", "excluded": true}'))
    assert notes.folder.repeats is None
    assert notes.of("a.png").excluded


def test_writing_keeps_unknown_keys_and_sets_no_others(tmp_path: Path) -> None:
    notes = read_sidecar(folder_with(tmp_path, LINES)).with_image("c.png", crop=(0.0, 0.0, 0.5, 1.0))
    write_sidecar(tmp_path, notes.with_image("a.png", excluded=False).with_folder(repeats=5))
    lines = [json.loads(line) for line in (tmp_path / FILE_NAME).read_text(encoding="utf-8").splitlines()]
    assert lines == [
        {"impasto": 1, "repeats": 5, "trigger": "zwx", "colour": "blue"},
        {"file": "a.png", "excluded": False, "note": {"by": "Käthe"}},
        {"file": "b.png", "rating": 4, "crop": [0, 0.25, 1, 0.75]},
        {"file": "c.png", "crop": [0.0, 0.0, 0.5, 1.0]},
    ]
    assert read_sidecar(tmp_path).of("c.png").crop == (0.0, 0.0, 0.5, 1.0)


def test_names_are_the_same_in_both_unicode_forms(tmp_path: Path) -> None:
    notes = read_sidecar(folder_with(tmp_path, '{"file": "Ho\u0308hle.png", "excluded": true}'))
    assert notes.of("H\u00f6hle.png").excluded
    assert notes.of("Ho\u0308hle.png").excluded


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{broken", "line 2"),
        ('{"file": "b.png", "crop": [0.5, 0, 0.5, 1]}', "left < right"),
        ('{"file": "b.png", "crop": [0, 0, 2, 1]}', "crop"),
        ('{"file": "b.png", "crop": [0, 0, 1]}', "crop"),
        ('{"file": "b.png", "excluded": "yes"}', "excluded"),
        ('{"excluded": true}', "file"),
        ("17", "line 2"),
    ],
)
def test_a_damaged_line_stops_and_is_named(tmp_path: Path, line: str, reason: str) -> None:
    text = '{"file": "a.png"}\n' + line
    with pytest.raises(DatasetError, match=reason) as caught:
        read_sidecar(folder_with(tmp_path, text))
    assert caught.value.code == "sidecar.damaged"
    assert (tmp_path / FILE_NAME).read_text(encoding="utf-8") == text


@pytest.mark.parametrize("head", ['{"impasto": 2}', '{"repeats": 0}', '{"repeats": "many"}', "[]", "{"])
def test_a_damaged_first_line_stops(tmp_path: Path, head: str) -> None:
    with pytest.raises(DatasetError, match="line 1"):
        read_sidecar(folder_with(tmp_path, head))


def test_changes_are_checked_too() -> None:
    with pytest.raises(ValueError, match="crop"):
        Sidecar().with_image("a.png", crop=(0.0, 0.0, 0.0, 1.0))
