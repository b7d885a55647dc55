"""Notices on every page, system notifications and a tray icon that report how training is going."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QEvent, QLocale, QObject, Qt, QTimer
from PySide6.QtGui import QCloseEvent, QGuiApplication
from PySide6.QtWidgets import QApplication, QFrame, QLabel, QSystemTrayIcon, QVBoxLayout, QWidget

from app.core.runs.watcher import Continuing, Ended
from app.core.session import Session
from app.qt.runs.rows import training_words
from app.qt.widgets import raise_window, until_destroyed

if TYPE_CHECKING:
    from app.qt.notices import Notices


_CLOSE_NOTICE_SECONDS = 2.5
_POLL_MS = 1000


class CloseNotice(QFrame):
    """Short notice that replaces the closed window; when the notice closes, the app quits unless a window is open."""

    def __init__(self, window: QWidget, goes_on: Continuing) -> None:
        # No parent: the app would not wait for a child of the closed window.
        super().__init__(None, Qt.WindowType.SplashScreen)
        self.setObjectName("farewell")
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setAttribute(Qt.WidgetAttribute.WA_QuitOnClose)
        self.setAttribute(Qt.WidgetAttribute.WA_ShowWithoutActivating)
        is_training = goes_on == "training"
        self.title = QLabel(
            self.tr("Training continues in the background.")
            if is_training
            else self.tr("The queue continues in the background.")
        )
        self.title.setProperty("role", "title")
        self.words = QLabel(self.tr("Open Impasto again at any time to see the progress."))
        self.words.setProperty("role", "muted")
        column = QVBoxLayout(self)
        column.setContentsMargins(36, 26, 36, 28)
        column.setSpacing(8)
        for label in (self.title, self.words):
            label.setAlignment(Qt.AlignmentFlag.AlignCenter)
            column.addWidget(label)
        self.adjustSize()
        self.move(window.frameGeometry().center() - self.rect().center())
        self.timer = QTimer(self, interval=round(_CLOSE_NOTICE_SECONDS * 1000), singleShot=True)
        self.timer.timeout.connect(self.close)
        self.timer.start()
        window.destroyed.connect(self.close)

    def closeEvent(self, event: QCloseEvent) -> None:  # noqa: N802
        """Stop the timer, which would close the notice a second time."""
        self.timer.stop()
        super().closeEvent(event)


class Notifier(QObject):
    """Notifies the user when a run ends; polls the runs once a second while any are active."""

    def __init__(self, session: Session, notices: Notices, window: QWidget) -> None:
        super().__init__(window)
        self._session, self._notices, self._window = session, notices, window
        self._tray: QSystemTrayIcon | None = None
        self._last: Ended | None = None
        self._notified: dict[Path, str] = {}
        """Text of each run's latest notice that it has ended, by run folder."""
        self.close_notice: CloseNotice | None = None
        self._timer = QTimer(self)
        self._timer.setInterval(_POLL_MS)
        self._timer.timeout.connect(session.run_watcher.look)
        self._timer.timeout.connect(session.training.look)
        until_destroyed(
            self,
            session.run_watcher.changed.connect(lambda _: self._watch()),
            session.run_watcher.ended.connect(self._on_ended),
            session.run_watcher.resumed.connect(self._on_run_resumed),
            session.training.changed.connect(lambda _: self._show_in_tray()),
        )
        window.installEventFilter(self)
        application = QGuiApplication.instance()
        assert isinstance(application, QGuiApplication)
        application.applicationStateChanged.connect(self._on_application_state_changed)
        session.runs.refresh()
        session.queue.look()
        self._watch()

    def _on_ended(self, ended: Ended) -> None:
        """Report that a run has ended, in the ways chosen in the preferences."""
        wanted = self._session.settings.preferences.telling
        if wanted.notify:
            words, well = self._words(ended), ended.summary.state == "done"
            words = self.tr("While Impasto was closed: {words}").format(words=words) if ended.earlier else words
            act = (self.tr("Show"), lambda: self._show(ended))
            self._notices.show_notice(words, "info" if well else "error", act)
            self._notified[ended.summary.path] = words
            if not ended.earlier:
                QApplication.alert(self._window)
            if not ended.earlier and not self._window.isActiveWindow():
                self._notify_system(ended, words)
        if wanted.sound and not ended.earlier:
            QApplication.beep()

    def show_close_notice(self, goes_on: Continuing) -> None:
        """Show a notice that training or the queue continues without the window; at logout, do nothing."""
        application = QGuiApplication.instance()
        assert isinstance(application, QGuiApplication)
        if not application.isSavingSession():  # at logout the system would not wait for the notice
            self.close_notice = CloseNotice(self._window, goes_on)
            self.close_notice.show()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:  # noqa: N802
        """Stop polling when the window closes (runs continue without it) and start again when it is shown."""
        if event.type() == QEvent.Type.Close:
            self._timer.stop()
        elif event.type() == QEvent.Type.Show:
            self._watch()
        return super().eventFilter(watched, event)

    def _watch(self) -> None:
        """Start or stop polling: it is needed only while runs are watched and the window is visible."""
        if not self._session.run_watcher.watching or not self._window.isVisible():
            self._timer.stop()
        elif not self._timer.isActive():
            self._timer.start()

    def _on_application_state_changed(self, state: Qt.ApplicationState) -> None:
        """When the user returns, check for runs started elsewhere; hide the tray icon if nothing is training."""
        if state == Qt.ApplicationState.ApplicationActive:
            self._session.runs.refresh()
            if self._tray and not self._session.training.now:
                self._tray.hide()

    def _on_run_resumed(self, run: Path) -> None:
        """Remove the notice that a run has ended, because the run was resumed."""
        if words := self._notified.pop(run, ""):
            self._notices.dismiss(words)

    def _words(self, ended: Ended) -> str:
        run, step = ended.summary, QLocale().toString(ended.summary.step)
        if run.state == "done":
            return self.tr("{run} finished after {step} steps.").format(run=run.name, step=step)
        if ended.job:
            return f"{self.tr('{job} could not start.').format(job=run.name)} {ended.why}".strip()
        if run.state in ("failed", "paused") or ended.why:
            words = self.tr("{run} failed at step {step}.")
            words = self.tr("{run} had to pause at step {step}.") if run.state == "paused" else words
            return f"{words.format(run=run.name, step=step)} {ended.why}".strip()
        words = self.tr("{run} stopped unexpectedly at step {step}; it can be resumed.")
        return words.format(run=run.name, step=step)

    def _notify_system(self, ended: Ended, words: str) -> None:
        """Show a system notification if the system supports it."""
        tray = self._get_tray()
        if tray is None or not QSystemTrayIcon.supportsMessages():
            return
        self._last = ended
        well = ended.summary.state == "done"
        sign = QSystemTrayIcon.MessageIcon.Information if well else QSystemTrayIcon.MessageIcon.Warning
        tray.show()
        tray.showMessage("Impasto", words, sign)

    def _get_tray(self) -> QSystemTrayIcon | None:
        """Return the tray icon, created on first use; None if the system has no tray."""
        if self._tray is None and QSystemTrayIcon.isSystemTrayAvailable():
            self._tray = QSystemTrayIcon(self._window.windowIcon(), self)
            self._tray.messageClicked.connect(self._come_forward)
            self._tray.activated.connect(lambda _: self._come_forward())
        return self._tray

    def _show_in_tray(self) -> None:
        """Show the current training in the tray; after a run ends, the icon stays until the user returns."""
        now, tray = self._session.training.now, self._get_tray()
        if tray is None:
            return
        tray.setToolTip(f"Impasto: {training_words(now)}" if now else "Impasto")
        if now:
            tray.show()
        elif self._window.isActiveWindow():
            tray.hide()

    def _come_forward(self) -> None:
        """Bring the window to the front and show the run of the latest system notification, if any."""
        raise_window(self._window)
        last, self._last = self._last, None
        if last:
            self._show(last)

    def _show(self, ended: Ended) -> None:
        """Show the ended run, or its job if the run never started."""
        if ended.job:
            self._session.navigator.job.emit(ended.job)
        else:
            self._session.navigator.run.emit(ended.summary.path)
