"""Keep the user informed of training, whichever page or program is looked at: tray icon, notifications, notices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QEvent, QLocale, QObject, Qt, QTimer
from PySide6.QtGui import QCloseEvent, QGuiApplication
from PySide6.QtWidgets import QApplication, QFrame, QLabel, QSystemTrayIcon, QVBoxLayout, QWidget

from app.core.runs.watcher import Ended, GoesOn
from app.core.session import Session
from app.qt.runs.rows import training_words
from app.qt.widgets import come_forward, until_destroyed

if TYPE_CHECKING:
    from app.qt.notices import Notices


_SECONDS = 2.5
_EVERY_MS = 1000


class CloseNotice(QFrame):
    """Stands for a moment where the window stood; the app ends with it, unless the window was opened again."""

    def __init__(self, window: QWidget, goes_on: GoesOn) -> None:
        # A window of its own: the app would not wait for one that belongs to the window that is closed.
        super().__init__(None, Qt.WindowType.SplashScreen)
        self.setObjectName("farewell")
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setAttribute(Qt.WidgetAttribute.WA_QuitOnClose)
        self.setAttribute(Qt.WidgetAttribute.WA_ShowWithoutActivating)
        trains = goes_on == "training"
        self.title = QLabel(
            self.tr("Training continues in the background.")
            if trains
            else self.tr("The queue continues in the background.")
        )
        self.title.setProperty("role", "title")
        self.words = QLabel(self.tr("Open Impasto again at any time to watch it."))
        self.words.setProperty("role", "muted")
        column = QVBoxLayout(self)
        column.setContentsMargins(36, 26, 36, 28)
        column.setSpacing(8)
        for label in (self.title, self.words):
            label.setAlignment(Qt.AlignmentFlag.AlignCenter)
            column.addWidget(label)
        self.adjustSize()
        self.move(window.frameGeometry().center() - self.rect().center())
        self.timer = QTimer(self, interval=round(_SECONDS * 1000), singleShot=True)
        self.timer.timeout.connect(self.close)
        self.timer.start()
        window.destroyed.connect(self.close)

    def closeEvent(self, event: QCloseEvent) -> None:  # noqa: N802
        """Wait for nothing any more."""
        self.timer.stop()
        super().closeEvent(event)


class Notifier(QObject):
    """Looks every second while something runs, and not at all otherwise."""

    def __init__(self, session: Session, notices: Notices, window: QWidget) -> None:
        super().__init__(window)
        self._session, self._notices, self._window = session, notices, window
        self._tray: QSystemTrayIcon | None = None
        self._last: Ended | None = None
        self._told: dict[Path, str] = {}
        """What was said last of the end of a run."""
        self.farewell: CloseNotice | None = None
        self._timer = QTimer(self)
        self._timer.setInterval(_EVERY_MS)
        self._timer.timeout.connect(session.telling.look)
        self._timer.timeout.connect(session.training.look)
        until_destroyed(
            self,
            session.telling.changed.connect(lambda _: self._watch()),
            session.telling.ended.connect(self.tell),
            session.telling.goes_on_again.connect(self._take_back),
            session.training.changed.connect(lambda _: self._show_in_tray()),
        )
        window.installEventFilter(self)
        application = QGuiApplication.instance()
        assert isinstance(application, QGuiApplication)
        application.applicationStateChanged.connect(self._turned_to)
        session.runs.look()
        session.queue.look()
        self._watch()

    def tell(self, ended: Ended) -> None:
        """Say that a run has ended, as the user wants to be told."""
        wanted = self._session.settings.preferences.telling
        if wanted.notify:
            words, well = self._words(ended), ended.summary.state == "done"
            words = self.tr("While Impasto was closed: {words}").format(words=words) if ended.earlier else words
            act = (self.tr("Show"), lambda: self._show(ended))
            self._notices.tell(words, "info" if well else "error", act)
            self._told[ended.summary.path] = words
            if not ended.earlier:
                QApplication.alert(self._window)
            if not ended.earlier and not self._window.isActiveWindow():
                self._tell_system(ended, words)
        if wanted.sound and not ended.earlier:
            QApplication.beep()

    def say_farewell(self, goes_on: GoesOn) -> None:
        """Say what continues though the window is closed, training or the queue."""
        application = QGuiApplication.instance()
        assert isinstance(application, QGuiApplication)
        if not application.isSavingSession():  # the system does not wait for it
            self.farewell = CloseNotice(self._window, goes_on)
            self.farewell.show()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:  # noqa: N802
        """Look no more when the window is closed, as runs go on without it, and again when it is shown again."""
        if event.type() == QEvent.Type.Close:
            self._timer.stop()
        elif event.type() == QEvent.Type.Show:
            self._watch()
        return super().eventFilter(watched, event)

    def _watch(self) -> None:
        """Let the clock run while there is something to wait for."""
        if not self._session.telling.watching or not self._window.isVisible():
            self._timer.stop()
        elif not self._timer.isActive():
            self._timer.start()

    def _turned_to(self, state: Qt.ApplicationState) -> None:
        """Look at what other programs may have begun, when the user comes back; he needs no icon any more then."""
        if state == Qt.ApplicationState.ApplicationActive:
            self._session.runs.look()
            if self._tray and not self._session.training.now:
                self._tray.hide()

    def _take_back(self, run: Path) -> None:
        """Say no longer that a run ended which was resumed."""
        if words := self._told.pop(run, ""):
            self._notices.take_back(words)

    def _words(self, ended: Ended) -> str:
        run, step = ended.summary, QLocale().toString(ended.summary.step)
        if run.state == "done":
            return self.tr("{run} is done after {step} steps.").format(run=run.name, step=step)
        if ended.job:
            return f"{self.tr('{job} could not begin.').format(job=run.name)} {ended.why}".strip()
        if run.state in ("failed", "paused") or ended.why:
            words = self.tr("{run} failed at step {step}.")
            words = self.tr("{run} had to pause at step {step}.") if run.state == "paused" else words
            return f"{words.format(run=run.name, step=step)} {ended.why}".strip()
        words = self.tr("{run} stopped unexpectedly at step {step}; it can be resumed.")
        return words.format(run=run.name, step=step)

    def _tell_system(self, ended: Ended, words: str) -> None:
        """Show a message of the system's, where it has such."""
        tray = self._have_tray()
        if tray is None or not QSystemTrayIcon.supportsMessages():
            return
        self._last = ended
        well = ended.summary.state == "done"
        sign = QSystemTrayIcon.MessageIcon.Information if well else QSystemTrayIcon.MessageIcon.Warning
        tray.show()
        tray.showMessage("Impasto", words, sign)

    def _have_tray(self) -> QSystemTrayIcon | None:
        """Return the icon in the system's tray; None where the system has no tray."""
        if self._tray is None and QSystemTrayIcon.isSystemTrayAvailable():
            self._tray = QSystemTrayIcon(self._window.windowIcon(), self)
            self._tray.messageClicked.connect(self._come_forward)
            self._tray.activated.connect(lambda _: self._come_forward())
        return self._tray

    def _show_in_tray(self) -> None:
        """Say in the tray what trains; the icon stays after the end of a run until the user comes back."""
        now, tray = self._session.training.now, self._have_tray()
        if tray is None:
            return
        tray.setToolTip(f"Impasto: {training_words(now)}" if now else "Impasto")
        if now:
            tray.show()
        elif self._window.isActiveWindow():
            tray.hide()

    def _come_forward(self) -> None:
        """Show the window, and the run that ended last, if one did since."""
        come_forward(self._window)
        last, self._last = self._last, None
        if last:
            self._show(last)

    def _show(self, ended: Ended) -> None:
        """Go to the run, or to the job that never became one."""
        if ended.job:
            self._session.going.job.emit(ended.job)
        else:
            self._session.going.run.emit(ended.summary.path)
