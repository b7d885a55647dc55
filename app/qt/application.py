"""Start Qt with one session and one window, and shut them down in order."""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from PySide6.QtCore import QDeadlineTimer, QObject, QThread, Signal
from PySide6.QtGui import QGuiApplication, QIcon
from PySide6.QtNetwork import QLocalServer, QLocalSocket
from PySide6.QtWidgets import QApplication, QMessageBox

from app.core.crashes import CrashLog
from app.core.session import Session
from app.core.settings.preferences import Settings
from app.core.tasks import shorten_switch_interval
from app.qt.main_thread import GcScheduler, MainThreadQueue
from app.qt.theme import Theme
from app.qt.theme.theme import FOLDER
from app.qt.widgets import install_language
from app.qt.window import Window
from trainer.errors import EXIT_FAULT, ImpastoError, RunError
from trainer.protocol import locks, places
from trainer.protocol.reading import parse_json

VERSION = 1
_PATIENCE_MS = 5000
_MAX_MESSAGE = 1 << 20
"""Maximum size of one message in bytes; enough for about ten thousand paths."""


class Instance(QObject):
    """Single-instance lock for the app, and the local server that later launches connect to.

    The operating system releases the lock when the process that holds it ends, so the process that gets the lock knows
    that an existing socket is stale. Request and reply are one line of JSON each: {"version": 1, "open": [paths]} and
    {"version": 1, "done": true}.
    """

    opened = Signal(list)
    """Emitted with the paths passed to a later launch; an empty list only brings the window to the front."""

    def __init__(self, home: Path, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._home = home
        self._lock = ExitStack()
        self._server: QLocalServer | None = None
        identity = f"{getpass.getuser()}\n{home.resolve()}"
        self.name = f"impasto-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"

    def claim(self) -> bool:
        """Try to become the only instance; return False if another one is running.

        If the lock file cannot be used, as on a disk without file locks, return True without listening for messages.
        """
        try:
            self._home.mkdir(parents=True, exist_ok=True)
            self._lock.enter_context(locks.hold_lock(self._home / "app.lock", patience=0))
        except locks.LockBusyError:
            return False
        except OSError:
            return True
        self._listen()
        return True

    def send(self, paths: Sequence[str]) -> None:
        """Ask the running instance to open these paths; raise RunError if it does not answer within five seconds."""
        deadline = QDeadlineTimer(_PATIENCE_MS)
        message = json.dumps({"version": VERSION, "open": [str(Path(path).absolute()) for path in paths]})
        answer = self._ask(message, deadline)
        if answer.get("done") is not True:
            raise RunError(
                "app.silent",
                "Impasto is already open, but its window does not respond.",
                "Wait a moment and try again, or end Impasto in the task manager.",
            )

    def close(self) -> None:
        """Stop listening and release the lock."""
        if self._server is not None:
            self._server.close()
        self._lock.close()

    def _ask(self, message: str, deadline: QDeadlineTimer) -> dict[str, Any]:
        socket = QLocalSocket()
        while not deadline.hasExpired():
            socket.connectToServer(self.name)
            if socket.waitForConnected(int(deadline.remainingTime())):
                socket.write(message.encode() + b"\n")
                while b"\n" not in bytes(socket.peek(_MAX_MESSAGE).data()):
                    if not socket.waitForReadyRead(int(deadline.remainingTime())):
                        return {}
                return _read(bytes(socket.readLine().data()))
            QThread.msleep(50)  # the first instance holds the lock but does not listen yet
        return {}

    def _listen(self) -> None:
        QLocalServer.removeServer(self.name)  # left by a killed instance: we hold the lock, so it is stale
        self._server = QLocalServer(self)
        self._server.setSocketOptions(QLocalServer.SocketOption.UserAccessOption)
        self._server.newConnection.connect(self._on_new_connection)
        self._server.listen(self.name)

    def _on_new_connection(self) -> None:
        assert self._server is not None
        while (socket := self._server.nextPendingConnection()) is not None:
            socket.disconnected.connect(socket.deleteLater)
            socket.readyRead.connect(lambda socket=socket: self._on_ready_read(socket))
            self._on_ready_read(socket)

    def _on_ready_read(self, socket: QLocalSocket) -> None:
        if socket.bytesAvailable() > _MAX_MESSAGE:
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


def run(words: Sequence[str]) -> int:
    """Open the window with these folders and files; return the exit code once the window is closed.

    If Impasto is already running, its window opens them instead.
    """
    settings = Settings()
    application = make_application(settings)
    instance = Instance(places.home())
    if not instance.claim():
        return _send_to_instance(instance, words)
    net = CrashLog()
    crash = net.last()
    net.install()
    try:
        return _run_session(application, settings, instance, net, crash, words)
    finally:
        net.uninstall()
        instance.close()


def make_application(settings: Settings) -> QApplication:
    """Create the QApplication with the user's scale, language and theme."""
    appearance = settings.preferences.appearance
    if appearance.scaling != 100:
        os.environ.setdefault("QT_SCALE_FACTOR", str(appearance.scaling / 100))  # Qt reads it only at startup
    application = QApplication([sys.argv[0]])
    shorten_switch_interval()
    GcScheduler(application)
    application.setApplicationName("Impasto")
    application.setDesktopFileName("impasto")
    application.setWindowIcon(QIcon(str(FOLDER / "impasto.svg")))
    install_language(application, appearance.language)
    theme = Theme(application, appearance.look)
    settings.changed.connect(lambda chosen: theme.choose(chosen.appearance.look))
    return application


def _run_session(
    application: QApplication,
    settings: Settings,
    instance: Instance,
    net: CrashLog,
    crash: str | None,
    words: Sequence[str],
) -> int:
    """Show the window for one session, run the event loop, write everything to disk, and return the exit code."""
    main_thread = MainThreadQueue()
    session = Session(main_thread.post, settings)
    try:
        window = Window(session)
        net.notified = lambda text: main_thread.post(lambda: window.report_error(text))
        instance.opened.connect(window.come_forward)
        window.painted.connect(lambda: window.open(words, session.reopen))
        window.painted.connect(lambda: _show_welcome_once(window))
        window.show()
        if crash:
            window.report_crash(crash)
        return application.exec()
    finally:
        net.notified = lambda text: None
        session.close()
        main_thread.close()


def _show_welcome_once(window: Window) -> None:
    """Show the welcome dialog on the first start, unless Qt runs offscreen, as in tests."""
    from app.core.settings.recent import is_first_start, remember_welcome

    if is_first_start() and QGuiApplication.platformName() != "offscreen":
        remember_welcome()
        window.show_welcome()


def _send_to_instance(instance: Instance, words: Sequence[str]) -> int:
    try:
        instance.send(words)
    except ImpastoError as error:
        QMessageBox.warning(None, "Impasto", f"{error.sentence}\n{error.remedy}")
        return EXIT_FAULT
    return 0
