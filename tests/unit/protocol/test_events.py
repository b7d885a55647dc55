import dataclasses
import json
import subprocess
import sys
import time
import typing

import pytest

from trainer.protocol import events
from trainer.protocol.events import EventWriter, StepEvent, UnknownEvent, latest_steps, read_events

EXAMPLES = [
    events.AttemptStarted(pid=4711, device="cuda:0"),
    events.PhaseStarted("cache_pictures", 40),
    events.PhaseProgress("download", 1 << 40, None),
    events.PhaseFinished("load", 1.25),
    events.CachingSpeed("cache_texts", 240, 12.5, None, 20.5, 400.0),
    events.StepEvent(7, 2, 0.125, 0.5, {"unet": 1e-4, "text_encoder": 5e-5}, 4, 0.75, False, 65536.0, 9 << 30, 0.25),
    events.Validation(10, 0.25, True, {"100": 0.5, "900": 0.125}),
    events.Preview(10, 0, "step000010-0.png", 2.5),
    events.Saved(10, "größe-step000010.safetensors", "ab" * 32),
    events.CheckpointEvent(10, "step-00000010"),
    events.Skipped(11, "gradient"),
    events.CommandEvent("sample", "done", "step000010-0.png"),
    events.Notice("memory.fallback", "Line one\nline two — “quoted” \u2028 大"),
    events.MemoryExhausted("train", 7, 20 << 20, "backward", "unet.mid_block", 5 << 30, 6 << 30, 5 << 30),
    events.SteppedDown(7, 1, {"gradient_checkpointing": "full", "micro_batch": 2}, False),
    events.Slow(9, 40.0, 1.5, "spilled", "7.9 of 8.0 GiB"),
    events.DataWait(60, 0.05, ["loader_workers"]),
    events.MemoryLeak(160, "gpu", 35, 0.03, 4 << 30, 1 << 27, {"float32 4x64x64": 1 << 26, "other": 1 << 20}),
    events.MemorySample("preview", 5 << 30, 6 << 30),
    events.PhaseMemory("first_step", 1.5, 5 << 30, 6 << 30, None, 2 << 30),
    events.ErrorEvent("disk.full", "The disk is full.", "Make room."),
    events.Finished("paused", 11, None),
]


def test_there_is_an_example_of_every_type():
    assert [type(event) for event in EXAMPLES] == list(events.TYPES.values())


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: event.type)
def test_every_event_comes_back_as_it_was_written(tmp_path, event):
    path = tmp_path / "events.jsonl"
    before = time.time()
    with EventWriter(path, attempt=3) as writer:
        stamped = writer.write(event)
    assert before <= stamped.time <= time.time()
    assert stamped == dataclasses.replace(event, time=stamped.time, attempt=3)
    assert read_events(path) == ([stamped], path.stat().st_size)
    line = json.loads(path.read_text(encoding="utf-8"))
    assert list(line)[:3] == ["type", "time", "attempt"]


def test_phases_keep_the_names_that_files_have():
    phases = typing.get_args(events.Phase)
    assert phases == (
        "download", "load", "check", "cache_pictures", "cache_texts", "train", "preview", "validate", "save",
    )  # fmt: skip


def test_numbers_that_are_not_finite_become_null(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventWriter(path, 1) as writer:
        writer.write(StepEvent(1, 0, float("nan"), float("inf"), {"unet": 1e-4}, 4, 1.0, True))
        writer.write(events.Validation(1, 0.5, False, {"100": float("-inf")}))
    step, validation = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    assert step["loss"] is None
    assert step["grad_norm"] is None
    assert validation["per_timestep"] == {"100": None}


def test_a_name_that_is_no_unicode_is_written_as_a_terminal_shows_it(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventWriter(path, 1) as writer:
        stamped = writer.write(events.Notice("picture", 'bad\udcfe.png and "\ud83c.png" are left out — \U0001f3f4'))
    assert json.loads(path.read_bytes())["sentence"] == 'bad?.png and "?.png" are left out — \U0001f3f4'
    expected = dataclasses.replace(stamped, sentence='bad?.png and "?.png" are left out — \U0001f3f4')
    assert read_events(path) == ([expected], path.stat().st_size)


def test_reading_goes_on_where_it_stopped_and_leaves_half_lines_for_later(tmp_path):
    path = tmp_path / "events.jsonl"
    assert read_events(path) == ([], 0)
    with EventWriter(path, 1) as writer:
        first = writer.write(events.Notice("a", "ä" * 10))
        seen, offset = read_events(path)
        assert seen == [first]
        second = events.to_line(dataclasses.replace(events.Notice("b", "大"), time=1.0, attempt=1)).encode()
        with path.open("ab") as file:
            file.write(second[:-6])  # in the middle of a letter
        assert read_events(path, offset) == ([], offset)
        with path.open("ab") as file:
            file.write(second[-6:] + b"\n")
        (event,), end = read_events(path, offset)
    assert event == events.Notice("b", "大", time=1.0, attempt=1)
    assert end == path.stat().st_size


def test_a_replaced_file_is_read_from_its_start(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventWriter(path, 1) as writer:
        event = writer.write(events.Notice("a", "b"))
    assert read_events(path, 10_000) == ([event], path.stat().st_size)


@pytest.mark.parametrize(
    "line",
    ["", "{", "[]", "7", '{"type": "step"}', '{"type": "from the future", "x": 1}', '{"no": "type"}', '{"type": []}'],
)
def test_what_is_not_known_is_kept(tmp_path, line):
    path = tmp_path / "events.jsonl"
    path.write_text(line + "\n", encoding="utf-8", newline="\n")
    (event,), _ = read_events(path)
    assert event == UnknownEvent(line)
    assert events.to_line(event) == line


def test_fields_of_a_later_version_are_left_out(tmp_path):
    line = '{"type": "skipped", "time": 1.0, "attempt": 2, "step": 5, "reason": "loss", "colour": "red"}'
    assert events.from_line(line) == events.Skipped(5, "loss", time=1.0, attempt=2)


@pytest.mark.parametrize("torn", [b'{"type": "st', b"\0" * 70_000, b"x" * 200_000])
def test_a_torn_last_line_is_cut_and_the_rest_stays(tmp_path, torn):
    path = tmp_path / "events.jsonl"
    with EventWriter(path, 1) as writer:
        for number in range(3):
            writer.write(events.Notice(str(number), "n"))
    whole = path.read_bytes()
    events.cut_torn_line(path)
    assert path.read_bytes() == whole
    path.write_bytes(whole + torn)
    events.cut_torn_line(path)
    assert path.read_bytes() == whole


def test_a_file_of_nothing_but_a_torn_line_becomes_empty(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"type"')
    events.cut_torn_line(path)
    assert path.read_bytes() == b""
    events.cut_torn_line(tmp_path / "missing.jsonl")


def test_the_latest_attempt_of_a_step_counts(tmp_path):
    def step(number: int, attempt: int) -> StepEvent:
        return StepEvent(number, 0, attempt / 10, None, {}, 1, 1.0, attempt=attempt)

    told = [step(1, 1), step(2, 1), step(3, 1), step(2, 2), events.Notice("a", "b"), step(4, 2), step(3, 2)]
    again = dataclasses.replace(step(4, 2), loss=0.75)  # a step that was gone back to and made once more
    assert latest_steps(told) == {1: step(1, 1), 2: step(2, 2), 3: step(3, 2), 4: step(4, 2)}
    assert latest_steps([*told, again])[4] == again
    assert latest_steps(reversed(told))[2] == step(2, 2)


def test_a_killed_writer_loses_no_event(tmp_path):
    code = (
        "import os\nfrom pathlib import Path\nfrom trainer.protocol import events\n"
        "writer = events.EventWriter(Path('events.jsonl'), 1)\n"
        "for number in range(100): writer.write(events.Skipped(number, 'loss'))\n"
        "os._exit(9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path).returncode == 9
    told, _ = read_events(tmp_path / "events.jsonl")
    assert [event.step for event in told] == list(range(100))


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on the size of files")
def test_a_full_disk_leaves_no_half_line(tmp_path):
    code = (
        "import resource\nfrom pathlib import Path\nfrom trainer.protocol import events\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 4096))\n"
        "writer = events.EventWriter(Path('events.jsonl'), 1)\n"
        "try:\n"
        "    while True: writer.write(events.Notice('a', 'x' * 300))\n"
        "except OSError: pass\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "writer.write(events.Notice('room', 'again'))\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    told, _ = read_events(tmp_path / "events.jsonl")
    assert [event.code for event in told] == ["a", "a", "room"]


def test_two_writers_one_after_the_other_append(tmp_path):
    path = tmp_path / "events.jsonl"
    for attempt in (1, 2):
        with EventWriter(path, attempt) as writer:
            writer.write(events.Skipped(1, "loss"))
    assert [event.attempt for event in read_events(path)[0]] == [1, 2]
