"""The crash net, in processes that really crash."""

import subprocess
import sys
import threading

import pytest

from app.core.crashes import CrashLog

START = "from app.core.crashes import CrashLog; net = CrashLog(); net.install(); "


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", START + code], capture_output=True, encoding="utf-8", check=False)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise RuntimeError('größer')", "RuntimeError: größer"),
        ("import ctypes; ctypes.string_at(0)", "ctypes"),  # a crash in native code
        ("import threading; threading.Thread(target=lambda: 1 / 0, name='painter').start()", "In thread painter"),
        ("import os; os.abort()", "Aborted"),
        (r"raise FileNotFoundError('caf\udce9.jpg')", r"FileNotFoundError: caf\udce9.jpg"),  # a name on Linux
    ],
)
def test_what_happened_is_there_at_the_next_start_and_only_then(code, words, per_user_folder):
    run(code)
    text = CrashLog().last()
    assert text.startswith("Impasto ")
    assert words in text
    assert CrashLog().last() is None
    assert (per_user_folder / "crash-last.log").read_text(encoding="utf-8") == text


def test_one_that_ended_well_leaves_nothing(per_user_folder):
    assert run("net.uninstall()").returncode == 0
    assert CrashLog().last() is None
    assert not (per_user_folder / "crash.log").exists()


def test_one_that_was_killed_without_a_word_is_no_crash():
    run("import os; os._exit(9)")
    assert CrashLog().last() is None


def test_an_exception_is_told_where_it_happens_and_other_hooks_stay(monkeypatch):
    heard, told = [], []
    monkeypatch.setattr(threading, "excepthook", heard.append)
    net = CrashLog()
    net.notified = told.append
    net.install()
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    net.uninstall()
    assert threading.excepthook == heard.append
    assert "ZeroDivisionError" in told[0]
    assert len(heard) == 1


def test_a_folder_that_cannot_be_written_keeps_nobody_from_starting(tmp_path):
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    net = CrashLog(tmp_path / "file")
    assert net.last() is None
    net.install()
    net.uninstall()
