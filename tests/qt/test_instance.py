"""One window per user: real processes, a real socket."""

import json
import os
import subprocess
import sys

import pytest
from PySide6.QtNetwork import QLocalServer, QLocalSocket

from app.qt.application import Instance
from trainer.errors import RunError


@pytest.fixture
def first(qapp, per_user_folder):
    instance = Instance(per_user_folder)
    assert instance.claim()
    yield instance
    instance.close()


def second_start(*words, cwd):
    """Start `python -m app` as a second one; it must end by itself."""
    return subprocess.Popen(
        [sys.executable, "-m", "app", *words], cwd=cwd, stderr=subprocess.PIPE, env={**os.environ}, encoding="utf-8"
    )


def test_a_second_start_hands_its_folders_to_the_first_and_ends_well(first, qtbot, tmp_path):
    (tmp_path / "Bilder 猫").mkdir()
    with qtbot.waitSignal(first.opened) as told:
        process = second_start("Bilder 猫", cwd=tmp_path)
    qtbot.waitUntil(lambda: process.poll() is not None)
    assert (process.returncode, process.communicate()[1].replace("This plugin does not support", "")) == (0, "")
    assert told.args == [[str(tmp_path / "Bilder 猫")]]  # whole: the first one stands in another folder


def test_another_user_folder_is_another_instance(first, tmp_path):
    other = Instance(tmp_path)
    assert other.claim()
    assert other.name != first.name
    other.close()


def test_the_right_is_free_again_after_the_first_closed(per_user_folder, qapp):
    for _ in range(2):
        instance = Instance(per_user_folder)
        assert instance.claim()
        instance.close()


def test_a_socket_that_a_killed_one_left_is_replaced(per_user_folder, qtbot):
    name = Instance(per_user_folder).name
    code = f"""
import os
from PySide6.QtCore import QCoreApplication
from PySide6.QtNetwork import QLocalServer
application = QCoreApplication([])
server = QLocalServer()
assert server.listen({name!r})
os._exit(1)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    instance = Instance(per_user_folder)
    assert instance.claim()
    socket = QLocalSocket()
    socket.connectToServer(name)
    assert socket.waitForConnected(5000)
    instance.close()


@pytest.mark.parametrize(
    "line", [b"no json\n", b"[1]\n", b'{"version": 2, "open": []}\n', b'{"version": 1, "open": 3}\n']
)
def test_a_message_that_means_nothing_is_refused_and_harms_nobody(first, qtbot, line):
    told = []
    first.opened.connect(told.append)
    socket = QLocalSocket()
    socket.connectToServer(first.name)
    with qtbot.waitSignal(socket.readyRead):
        socket.write(line)
    assert json.loads(bytes(socket.readLine().data())) == {"version": 1, "done": False}
    assert told == []


def test_a_first_one_that_does_not_answer_is_told(first, monkeypatch, tmp_path):
    monkeypatch.setattr("app.qt.application._PATIENCE_MS", 300)
    deaf = QLocalServer()
    first.close()
    assert deaf.listen(first.name)
    with pytest.raises(RunError, match="does not respond"):
        first.send(["a"])
    deaf.close()
