"""Pieces of a log, finding in it, remarks, and what is copied for a bug report; on real files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.core.runs import log
from app.core.runs.log import CHUNK_BYTES, find, lines_of, read_after, read_before, read_end, report_on, without_home
from app.core.runs.run import Remarks
from tests.support.written_runs import held, new_run
from trainer.protocol import events

LINES = 60_000


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    lines = [f"Zeile {number}: {'wörter ' * (number % 9)}".rstrip() for number in range(LINES)]
    path = tmp_path_factory.mktemp("log ü") / "console.log"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
    return path, lines


def test_pieces_from_the_end_to_the_start_are_the_whole_log(written):
    path, lines = written
    piece = read_end(path, torn=False)
    assert piece.end == piece.size == path.stat().st_size
    assert piece.end - piece.start <= CHUNK_BYTES
    found = list(piece.lines)
    while piece.start:
        piece = read_before(path, piece.start)
        found = [*piece.lines, *found]
    assert found == lines


def test_pieces_from_the_start_to_the_end_are_the_whole_log(written):
    path, lines = written
    piece = read_after(path, 0, torn=False)
    found = list(piece.lines)
    while piece.end < piece.size:
        piece = read_after(path, piece.end, torn=False)
        found += piece.lines
    assert found == lines
    assert not piece.more


def test_a_line_that_is_being_written_waits_for_its_end_unless_none_will_come(tmp_path):
    path = tmp_path / "console.log"
    path.write_bytes(b"whole\nhal")
    assert read_end(path, torn=False).lines == ("whole",)
    assert read_end(path, torn=True).lines == ("whole", "hal")
    first = read_after(path, 0, torn=False)
    path.write_bytes(b"whole\nhalf\nnext")
    assert read_after(path, first.end, torn=False).lines == ("half",)
    assert read_after(path, first.end, torn=True).lines == ("half", "next")


def test_a_log_that_is_missing_empty_or_one_endless_line(tmp_path):
    path = tmp_path / "console.log"
    assert read_end(path, torn=True) == log.LogChunk(0, 0, 0, ())
    path.write_bytes(b"")
    assert read_end(path, torn=False).lines == ()
    path.write_bytes(b"x" * (3 * CHUNK_BYTES))
    piece = read_end(path, torn=True)
    assert sum(map(len, piece.lines)) == CHUNK_BYTES
    assert max(map(len, piece.lines)) < CHUNK_BYTES, "a field would lay it out as a whole"
    assert read_before(path, piece.start).end == piece.start
    assert read_after(path, 0, torn=False).end == CHUNK_BYTES


def test_lines_are_as_a_terminal_shows_them():
    printed = "10%\r 50%\r100%\n\x1b[31mred\x1b[0m text\x07\r\n\ttab\n\x1b]0;title\x07plain\n\udcff".encode(
        "utf-8", "surrogateescape"
    )
    assert lines_of(printed) == ("100%", "red text", "\ttab", "plain", "\ufffd")


def test_a_text_is_found_in_both_directions_across_blocks(written, monkeypatch):
    monkeypatch.setattr(log, "_BLOCK", 1000)
    path, lines = written
    data = path.read_bytes()
    for number in (0, 1, 12_345, LINES - 1):
        place = data.index(f"Zeile {number}:".encode())
        assert find(path, f"zeile {number}:", 0, back=False) == place
        assert find(path, f"ZEILE {number}:", len(data), back=True) == place
    second = find(path, "wörter", find(path, "wörter", 0, back=False) + len(lines[1]) + 2, back=False)
    assert data[second:].startswith(b"Zeile 2:")
    assert find(path, "Zeile 5:", data.index(b"Zeile 5:"), back=True) is None
    assert find(path, "nowhere", 0, back=False) is None
    assert find(path, "", 0, back=False) is None
    assert find(path.with_name("gone.log"), "a", 0, back=False) is None


def remarks(*told: events.Event) -> list[tuple[str, str, int]]:
    all_of_it = Remarks()
    for event in told:
        all_of_it.add_event(event)
    return [(type(one.event).__name__, one.kind, one.times) for one in all_of_it.all]


def test_what_is_said_again_and_again_is_one_remark():
    notice = events.Notice(code="base", sentence="SD 1.5.")
    skips = [events.Skipped(step=step, reason="loss") for step in range(5)]
    other = events.Skipped(step=6, reason="gradient")
    error = events.ErrorEvent(code="a", sentence="It failed.", remedy="Try again.")
    assert remarks(notice, *skips, other, notice, error) == [
        ("Notice", "info", 2),
        ("Skipped", "warning", 5),
        ("Skipped", "warning", 1),
        ("ErrorEvent", "error", 1),
    ]


def test_only_what_matters_is_a_remark_and_only_so_many_are_kept():
    done = events.CommandEvent(name="save", outcome="done", detail="")
    void = events.CommandEvent(name="save", outcome="void", detail="")
    assert remarks(done, events.PhaseStarted(phase="train", total=1), void) == [("CommandEvent", "warning", 1)]
    many = remarks(*(events.Notice(code="n", sentence=f"{number}") for number in range(1000)))
    assert len(many) == 200


def test_a_report_holds_what_helps_and_not_who_wrote_it(tmp_path, monkeypatch):
    home = tmp_path / "Zoë K"
    monkeypatch.setattr(Path, "home", lambda: home)
    run = new_run(home / "runs", "cats")
    with held(run) as engine:
        engine.stand("running", 10, "train")
    run.console.write_text(f"{home}/base.safetensors is damaged\n", encoding="utf-8")
    text = report_on(run, ["The loss was no finite number."])
    assert "Run cats" in text
    assert "State: interrupted, attempt 1" in text
    assert '"impasto": "0.1.0"' in text
    assert "The loss was no finite number." in text
    assert 'name = "cats"' in text
    assert "~/base.safetensors is damaged" in text
    assert "Zoë" not in text
    host = json.loads(run.run.read_text(encoding="utf-8"))["attempts"][0]["host"]
    assert f'"{host}"' not in text


def test_a_report_leaves_out_the_secrets_of_links_that_earlier_versions_wrote(tmp_path):
    run = new_run(tmp_path, "cats")
    link = "https://ann:pass1word@models.example/file.safetensors?token=9f8e7d6c#x"
    run.job.write_text(f'base.model = "{link}"\n', encoding="utf-8")
    run.console.write_text(f"Downloading {link}.\n", encoding="utf-8")
    record = {"name": "cats", "attempts": [{"number": 1, "job": {"base.model": link}}]}
    run.run.write_text(json.dumps(record), encoding="utf-8")
    text = report_on(run, [])
    assert not [secret for secret in ("ann", "pass1word", "9f8e7d6c") if secret in text]
    assert text.count("models.example/file.safetensors") == 3


def test_a_report_on_a_damaged_run_says_so(tmp_path):
    run = new_run(tmp_path, "cats")
    run.run.write_text("{", encoding="utf-8")
    run.job.unlink()
    text = report_on(run, [])
    assert "Could not read the run's history" in text
    assert "No such file" in text or "cannot find" in text


@pytest.mark.parametrize(
    ("home", "text", "expected"),
    [
        ("/home/zoe", "/home/zoe/a /home/zoey/b", "~/a /home/zoey/b"),
        ("/", "/a/b", "/a/b"),
        (r"C:\Users\Zoe", r'C:\Users\Zoe\a "C:\\Users\\Zoe\\b" C:/Users/Zoe/c', r'~\a "~\\b" ~/c'),
    ],
)
def test_the_home_folder_is_left_out_however_it_is_written(home, text, expected):
    assert without_home(text, Path(home)) == expected
