"""However large or broken a file is, what is said of it stays short."""

import json

import pytest

from tests.support.images import photograph
from trainer import cli
from trainer.cli import common
from trainer.config.job import DatasetConfig, FolderConfig
from trainer.dataset.caption_files import LARGEST, read_metadata
from trainer.dataset.findings import Finding, by_severity
from trainer.dataset.folders import scan_folders
from trainer.errors import LONGEST_MESSAGE, DatasetError, ImpastoError, JobError
from trainer.importers.sd_scripts.dataset import import_dataset
from trainer.protocol.text import LONGEST_LINE, MOST_LINES

MANY = 100_000
KIB = 1024


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "images"
    place.mkdir()
    photograph().resize((256, 256)).save(place / "a.png")
    return place


def shown(words, capsys):
    assert cli.main(words) == 2
    told = capsys.readouterr()
    return told.out + told.err


def test_a_hundred_thousand_bad_lines_are_one_short_list(folder, capsys):
    lines = ['{"file_name": "a.png", "text": "a cat"}', *(f'{{"file_name": "{number}.png"}}' for number in range(MANY))]
    (folder / "metadata.jsonl").write_text("\n".join(lines), encoding="utf-8")
    text = shown(["check", "images"], capsys)
    assert "line 2: it has no caption" in text
    assert f"{MANY - 20:,} more lines cannot be used" in text
    assert len(text) < 10 * KIB


def test_thousands_of_bad_caption_files_are_one_short_list(folder, capsys):
    for number in range(200):
        (folder / f"{number}.png").write_bytes(b"")
        (folder / f"{number}.txt").write_bytes(b"a\0b")
    text = shown(["check", "images"], capsys)
    assert "180 more findings like the previous 20." in text
    assert len(text) < 25 * KIB


def test_findings_of_few_are_all_there():
    few = [Finding("a", {"number": number}) for number in range(20)]
    assert by_severity(few) == tuple(sorted(few, key=lambda finding: finding.paths))
    more = [Finding("a", {"name": "x"}), Finding("a", {"name": "w"}), Finding("b", {})]
    many = by_severity([*few, *more, Finding("a", {}, severity="error")])
    assert [finding.code for finding in many] == ["a", *["a"] * 21, "b"]


@pytest.mark.parametrize("kind", ["job.toml", "preset.toml"])
def test_a_file_of_thousands_of_unknown_keys_is_refused_in_few_lines(kind, folder, capsys):
    names = "".join(f"x{number} = 1\n" for number in range(250))
    head = 'schema = 1\nname = "a"\n[base]\n' + ('model = "own/er"\n' if kind == "job.toml" else 'family = "sdxl"\n')
    (folder / kind).write_text(head + names, encoding="utf-8")
    words = ["check"] if kind == "job.toml" else ["presets", "check"]
    text = shown([*words, str(folder / kind)], capsys)
    assert "more" in text
    assert text.count("unknown key") <= 30
    assert len(text) < 20 * KIB


def test_a_caption_in_a_list_may_be_no_longer_than_one_in_a_file(folder):
    long = "a" * (LARGEST + 1)
    rows = [{"file_name": "a.png", "text": long}, {"file_name": "b.png", "text": long[1:]}]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    captions, faults = read_metadata(folder / "metadata.jsonl")
    assert list(captions) == ["b.png"]
    assert faults == [f"line 1: its text is longer than {LARGEST:,} characters"]
    scan = scan_folders(DatasetConfig(folders=(FolderConfig(path=str(folder)),)), {})
    assert len(scan.findings[0].sentence) < KIB
    (folder / "m.json").write_text(json.dumps({"a.png": {"tags": long}}), encoding="utf-8")
    (folder / "k.toml").write_text(
        '[[datasets]]\n[[datasets.subsets]]\nimage_dir = "."\nmetadata_file = "m.json"\n', encoding="utf-8"
    )
    with pytest.raises(DatasetError, match="its tags is longer than"):
        import_dataset(folder / "k.toml")


def test_a_line_nested_without_end_costs_itself_alone(folder):
    lines = ["[" * MANY, '{"file_name": "a.png", "text": "a cat"}']
    (folder / "metadata.jsonl").write_text("\n".join(lines), encoding="utf-8")
    captions, faults = read_metadata(folder / "metadata.jsonl")
    assert captions == {"a.png": "a cat"}
    assert len(faults) == 1
    assert faults[0].startswith("line 1: ")
    assert "nested too deeply" in faults[0]


def test_another_trainers_file_makes_a_hundred_notes_at_most(folder):
    keys = "".join(f"x{number} = 1\n" for number in range(500))
    (folder / "k.toml").write_text(f'[general]\n{keys}[[datasets]]\n[[datasets.subsets]]\nimage_dir = "."\n', "utf-8")
    notes = import_dataset(folder / "k.toml").notes
    assert len(notes) == 101
    assert notes[-1] == "Other settings in the file were not imported."


def test_messages_have_an_end(capsys):
    error = ImpastoError("a", "x" * 10 * LONGEST_MESSAGE, "y" * 10 * LONGEST_MESSAGE)
    assert len(error.sentence) <= LONGEST_MESSAGE
    assert len(error.remedy) <= LONGEST_MESSAGE
    common.echo("x" * 10 * LONGEST_LINE)
    assert len(capsys.readouterr().out) == LONGEST_LINE + 1
    common.echo("\n".join(["x"] * MANY))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == MOST_LINES + 1
    assert lines[-1] == f"  and {MANY - MOST_LINES:,} more lines"


def test_the_problems_of_an_error_are_listed_in_part(monkeypatch, capsys):
    problems = tuple(f"key{number}: wrong" for number in range(MANY))
    error = JobError("a", "a.toml has problems", "Correct it.", problems)

    def fail(_):
        raise error

    monkeypatch.setattr("trainer.cli.runs.run_prune", fail)
    assert cli.main(["prune"]) == 2
    assert len(capsys.readouterr().err) < KIB


def test_a_traceback_is_shown_to_its_end(monkeypatch, capsys):
    def deep(number):
        if number == 0:
            raise ValueError("the last line")
        deep_twice(number)

    def deep_twice(number):
        deep(number - 1)

    monkeypatch.setattr("trainer.cli.runs.run_prune", lambda _: deep(60))
    assert cli.main(["--debug", "prune"]) == 1
    assert "the last line" in capsys.readouterr().err.splitlines()[-1]
