"""One window per user: a second start hands what it should open to the first, and ends."""

from __future__ import annotations

import getpass
import hashlib
import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from PySide6.QtCore import QDeadlineTimer, QObject, QThread, Signal
from PySide6.QtNetwork import QLocalServer, QLocalSocket

from trainer.errors import RunError
from trainer.protocol import locks
from trainer.protocol.reading import parse_json

VERSION = 1
_PATIENCE_MS = 5000
_LONGEST = 1 << 20
"""Bytes of a message: some ten thousand paths."""


class Instance(QObject):
    """The right to be the user's one window, and the ear for later starts.

    The right is a lock that the system frees when its holder dies, so a socket that a dead one left behind is known to
    be stale. One line of JSON each way: {"version": 1, "open": [paths]}, answered by {"version": 1, "done": true}.
    """

    opened = Signal(list)
    """Paths that a later start was given; an empty list asks only for the window to come forward."""

    def __init__(self, home: Path, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._home = home
        self._held = ExitStack()
        self._server: QLocalServer | None = None
        who = f"{getpass.getuser()}\n{home.resolve()}"
        self.name = f"impasto-{hashlib.sha256(who.encode()).hexdigest()[:16]}"

    def claim(self) -> bool:
        """Become the one instance; False where another one is. On a disk without locks everybody is the first."""
        try:
            self._home.mkdir(parents=True, exist_ok=True)
            self._held.enter_context(locks.held(self._home / "app.lock", patience=0))
        except locks.LockBusyError:
            return False
        except OSError:
            return True
        self._listen()
        return True

    def send(self, paths: Sequence[str]) -> None:
        """Let the one instance open these; raises RunError where it does not answer within five seconds."""
        deadline = QDeadlineTimer(_PATIENCE_MS)
        message = json.dumps({"version": VERSION, "open": [str(Path(path).absolute()) for path in paths]})
        answer = self._ask(message, deadline)
        if answer.get("done") is not True:
            raise RunError(
                "app.silent",
                "Impasto is open already, but its window does not answer.",
                "Wait a moment and try again, or end it in the system's list of running programs.",
            )

    def close(self) -> None:
        """Give the right back."""
        if self._server is not None:
            self._server.close()
        self._held.close()

    def _ask(self, message: str, deadline: QDeadlineTimer) -> dict[str, Any]:
        socket = QLocalSocket()
        while not deadline.hasExpired():
            socket.connectToServer(self.name)
            if socket.waitForConnected(int(deadline.remainingTime())):
                socket.write(message.encode() + b"\n")
                while b"\n" not in bytes(socket.peek(_LONGEST).data()):
                    if not socket.waitForReadyRead(int(deadline.remainingTime())):
                        return {}
                return _read(bytes(socket.readLine().data()))
            QThread.msleep(50)  # the first one holds the lock, but does not listen yet
        return {}

    def _listen(self) -> None:
        QLocalServer.removeServer(self.name)  # left by one that was killed: we hold its lock
        self._server = QLocalServer(self)
        self._server.setSocketOptions(QLocalServer.SocketOption.UserAccessOption)
        self._server.newConnection.connect(self._meet)
        self._server.listen(self.name)

    def _meet(self) -> None:
        assert self._server is not None
        while (socket := self._server.nextPendingConnection()) is not None:
            socket.disconnected.connect(socket.deleteLater)
            socket.readyRead.connect(lambda socket=socket: self._hear(socket))
            self._hear(socket)

    def _hear(self, socket: QLocalSocket) -> None:
        if socket.bytesAvailable() > _LONGEST:
            socket.abort()
        elif socket.canReadLine():
            message = _read(bytes(socket.readLine().data()))
            paths = message.get("open")
            known = message.get("version") == VERSION and isinstance(paths, list)
            socket.write(json.dumps({"version": VERSION, "done": known}).encode() + b"\n")
            socket.disconnectFromServer()
            if known:
                self.opened.emit([path for path in paths or () if isinstance(path, str)])


def _read(line: bytes) -> dict[str, Any]:
    try:
        message = parse_json(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}
