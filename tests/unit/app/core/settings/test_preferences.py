"""Preferences on disk: what comes back, and what happens to files that mean nothing."""

import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from app.core.settings import recent
from app.core.settings.deferred_writer import DeferredWriter
from app.core.settings.preferences import Appearance, Preferences, Settings
from trainer.protocol import files


@pytest.fixture
def path(per_user_folder):
    return per_user_folder / "größe" / "preferences.toml"


def write(path, data: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)


def test_what_is_changed_is_there_at_the_next_start(path):
    told = []
    store = Settings(path)
    store.changed.connect(told.append)
    wanted = Preferences(appearance=Appearance(look="dark", scaling=150), shortcuts={"a.b": ("Ctrl+K", "?")})
    store.change(wanted)
    store.change(wanted)
    store.file.settle()
    assert told == [wanted]
    again = Settings(path)
    assert (again.preferences, again.file.notice) == (wanted, "")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.dictionaries(st.text(max_size=20), st.lists(st.text(max_size=10), max_size=3).map(tuple), max_size=4))
def test_any_text_survives_the_file(path, shortcuts):
    wanted = Preferences(shortcuts=shortcuts)
    path.unlink(missing_ok=True)
    store = Settings(path)
    store.change(wanted)
    store.file.settle()
    assert Settings(path).preferences == wanted


@pytest.mark.parametrize("data", [b"[appearance\n", b"\xff\xfe\x00", b"appearance = 1\nappearance = 2"])
def test_a_broken_file_is_set_aside_and_told(path, data):
    write(path, data)
    store = Settings(path)
    assert store.preferences == Preferences()
    aside = path.with_name("preferences.damaged.toml")
    assert aside.read_bytes() == data
    assert not path.exists()
    assert str(aside) in store.file.notice


def test_a_second_broken_file_does_not_overwrite_the_first(path):
    for data in (b"[one", b"[two"):
        write(path, data)
        Settings(path)
    assert path.with_name("preferences.damaged.toml").read_bytes() == b"[one"
    assert path.with_name("preferences.damaged-2.toml").read_bytes() == b"[two"


def test_values_that_mean_nothing_are_left_out_and_the_others_kept(path):
    write(path, b'future = 1\n[appearance]\nlook = "dark"\nscaling = 900\nunknown = true\n')
    store = Settings(path)
    assert store.preferences == Preferences(appearance=Appearance(look="dark"))
    for name in ("future", "appearance.scaling", "appearance.unknown"):
        assert name in store.file.notice


def test_a_section_that_is_no_table_is_left_out(path):
    write(path, b'appearance = "dark"\n[shortcuts]\n"a" = ["X"]\n')
    assert Settings(path).preferences == Preferences(shortcuts={"a": ("X",)})


def test_what_cannot_be_written_holds_for_this_session_and_is_told_and_written_with_the_next(path):
    path.parent.write_text("a file", encoding="utf-8")
    store, told, failed, mended = Settings(path), [], [], []
    store.changed.connect(told.append)
    store.file.failed.connect(failed.append)
    store.file.resolved.connect(mended.append)
    dark = Preferences(appearance=Appearance(look="dark"))
    store.change(dark)
    store.file.settle()
    assert store.preferences == dark and told == [dark]
    assert [error.code for error in failed] == ["settings.unwritable"] and not mended
    assert "größe" in failed[0].sentence
    path.parent.unlink()
    store.set_checks(tokens=150)
    store.file.settle()
    assert Settings(path).preferences == store.preferences != dark
    assert len(failed) == 1 and mended == failed


def test_a_window_does_not_wait_for_a_disk_that_sleeps(path, monkeypatch):
    awake, real, posted, failed = threading.Event(), files.write_text, [], []

    def sleepy(path: Path, text: str, *, durable: bool = True) -> None:
        assert durable and awake.wait(60)
        real(path, text, durable=durable)

    monkeypatch.setattr(files, "write_text", sleepy)
    store, dark = Settings(path), Preferences(appearance=Appearance(look="dark"))
    store.file.post = posted.append
    store.file.failed.connect(failed.append)
    store.change(dark)
    assert store.preferences == dark and not path.exists()
    awake.set()
    store.file.settle()
    assert Settings(path).preferences == dark
    path.unlink()
    path.parent.rmdir()
    path.parent.write_text("a file", encoding="utf-8")
    store.set_checks(tokens=150)
    store.file.settle()
    assert failed == []  # until the window's thread has time for it
    posted.pop()()
    assert [error.code for error in failed] == ["settings.unwritable"]


def test_what_the_schema_does_not_allow_is_refused():
    with pytest.raises(ValidationError):
        Appearance(scaling=99)


def test_the_windows_place_comes_back_and_nonsense_does_not(per_user_folder):
    assert recent.read_window_state() == ({}, "")
    recent.write_window_state({"geometry": "AAAA"})
    assert recent.read_window_state() == ({"geometry": "AAAA"}, "")
    for text in ("[1]", "{", '{"geometry": 3}'):
        recent.window_state_file().write_text(text, encoding="utf-8")
        assert recent.read_window_state()[0] == {}


def test_a_small_file_is_written_behind_and_only_the_latest_text_of_those_that_wait(tmp_path, monkeypatch):
    awake, written, real = threading.Event(), [], files.write_text

    def sleepy(path: Path, text: str, *, durable: bool = True) -> None:
        assert awake.wait(60)
        written.append(text)
        real(path, text, durable=durable)

    monkeypatch.setattr(files, "write_text", sleepy)
    file = DeferredWriter(tmp_path / "new" / "list.json", "the list was")
    for text in "abcd":
        file.write(text)  # although the disk sleeps
    awake.set()
    file.settle()
    # Which one the writer comes to take first depends on when it starts; of those that wait then, only the latest.
    assert len(written) <= 2 and written[-1] == "d" and file.path.read_text(encoding="utf-8") == "d"


def test_a_disk_that_refuses_a_small_file_stops_nobody_and_is_asked_again_at_the_end(tmp_path):
    (tmp_path / "place").write_text("a file", encoding="utf-8")
    file = DeferredWriter(tmp_path / "place" / "list.json", "the list was")
    file.write("a")
    file.settle()
    (tmp_path / "place").unlink()
    file.settle()
    assert file.path.read_text(encoding="utf-8") == "a"
    file.write("b")
    file.settle()
    assert file.path.read_text(encoding="utf-8") == "b"
