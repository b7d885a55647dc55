"""Scrolling sheet that shows the open job: its name, the essentials, and all settings below them."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QPoint, QSize, Qt, QTimer
from PySide6.QtGui import QFont
from PySide6.QtWidgets import (
    QFrame,
    QHBoxLayout,
    QLabel,
    QLineEdit,
    QPushButton,
    QScrollArea,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app.core.jobs.draft import Draft
from app.core.session import Session
from app.core.words import sentence_of
from app.qt.theme import set_icon
from app.qt.train.blocks import BLOCKS, BlockRows
from app.qt.train.essentials import Essentials
from app.qt.train.form import Line, SettingsForm
from app.qt.widgets import center, set_message
from trainer.config.presets.library import PresetEntry

_MAX_WIDTH = 820
"""Maximum width of the sheet in logical pixels; longer lines of text would be hard to read."""
_MIN_WIDTH = 500
_COUNT_MS = 200
_ABOVE_SEARCH = 12
"""Space that is left above the search row when the settings are scrolled into view."""


class JobSheet(QScrollArea):
    """Scrolling sheet that shows the open job."""

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._draft: Draft | None = None
        self.name, self.state, self.fault = Line(), QLabel(), QLabel()
        self.essentials = Essentials(session)
        self.all, self.search, self.differences = QToolButton(), QLineEdit(), QLabel()
        self.form = SettingsForm({BLOCKS: BlockRows})
        self._inner, self.empty_state = QWidget(), NoJobState()
        self._counting = QTimer(self)
        self._counting.setSingleShot(True)
        self._counting.setInterval(_COUNT_MS)
        self._bringing_up_settings = False
        """Whether the settings are still being scrolled into view; the form adds its rows little by little."""
        self._build()
        self._counting.timeout.connect(self.essentials.refresh)
        self.name.textEdited.connect(self._on_name_edited)
        self.name.editingFinished.connect(self._on_editing_finished)
        self.all.toggled.connect(self._on_all_toggled)
        self.search.textChanged.connect(self._on_search_changed)
        self.verticalScrollBar().rangeChanged.connect(self._on_range_changed)
        self.verticalScrollBar().actionTriggered.connect(self._on_scrolled_by_user)

    def show_draft(self, draft: Draft | None) -> None:
        """Show this job (None: the empty state), scrolled to the top."""
        self._draft = draft
        self.state.clear()
        self.essentials.show_draft(draft)
        self._inner.setVisible(draft is not None)
        self.empty_state.setVisible(draft is None)
        self.verticalScrollBar().setValue(0)

    def show_recipes(self, presets: Sequence[PresetEntry]) -> None:
        """Show these recipes as cards."""
        self.essentials.show_recipes(presets)

    def refresh(self) -> None:
        """Show the job's current values."""
        draft = self._draft
        if draft is None:
            return
        name = draft.get("name")
        self.name.show_text(name if isinstance(name, str) else "")
        fault = next((reason for key, reason in draft.problems if key == "name"), "")
        set_message(self.fault, sentence_of(fault) if fault else "")
        self.essentials.refresh()
        if draft.file.unsaved:
            self.show_unsaved() if draft.file.error else self.state.setText(self.tr("Saving…"))
        if self.all.isChecked():
            self.form.show_draft(draft, self.essentials.length.samples)
        self._show_differences(draft)

    def show_saved(self) -> None:
        """Show that all changes are saved."""
        self.state.setText(self.tr("All changes saved"))

    def show_unsaved(self) -> None:
        """Show that the changes could not be saved; a notice gives the reason."""
        self.state.setText(self.tr("Not saved"))

    def count_soon(self) -> None:
        """Count the images again after a short delay; further calls during the delay have no effect."""
        if not self._counting.isActive():
            self._counting.start()

    def find_setting(self) -> None:
        """Focus the search field."""
        self._bring_up_settings()
        self.search.setFocus()
        self.search.selectAll()

    def show_setting(self, key: str) -> None:
        """Show a setting by searching for its key."""
        self.search.setText(key)
        self.find_setting()

    def _on_name_edited(self, text: str) -> None:
        if self._draft is not None:
            self._draft.set("name", text, typing=True)

    def _on_editing_finished(self) -> None:
        if self._draft is not None:
            self._draft.seal()

    def _on_all_toggled(self, on: bool) -> None:
        set_icon(self.all, "down" if on else "right")
        self.form.setVisible(on)
        if on:
            self.form.show_draft(self._draft, self.essentials.length.samples)
            self.form.begin()
            self._bring_up_settings()
        else:
            self._bringing_up_settings = False

    def _on_search_changed(self, text: str) -> None:
        self.form.search(text)
        if text.strip():
            self.all.setChecked(True)
            self._bring_up_settings()

    def _bring_up_settings(self) -> None:
        """Scroll down until the search row is at the top, so that the settings below it are in view."""
        bar = self.verticalScrollBar()
        target = self.all.mapTo(self._inner, QPoint(0, -_ABOVE_SEARCH)).y()
        bar.setValue(max(bar.value(), target))
        self._bringing_up_settings = bar.value() < target

    def _on_range_changed(self) -> None:
        if self._bringing_up_settings:
            self._bring_up_settings()

    def _on_scrolled_by_user(self) -> None:
        self._bringing_up_settings = False

    def _show_differences(self, draft: Draft) -> None:
        count, preset = len(draft.differences), draft.origin.preset
        if preset is None:
            words = self.tr("%Ln setting(s) changed", "", count) if count else self.tr("All defaults")
        else:
            words = self.tr("%Ln setting(s) differ from “{preset}”", "", count) if count else self.tr("From “{preset}”")
            words = words.format(preset=preset.name)
        self.differences.setText(words)

    def _build(self) -> None:
        self.setWidgetResizable(True)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.form.hide()
        for label in (self.fault, self.differences):
            label.setTextFormat(Qt.TextFormat.PlainText)
        for label in (self.state, self.differences):
            label.setProperty("role", "muted")
        self.fault.setProperty("role", "bad")
        self._build_name()
        self._inner.setMaximumWidth(_MAX_WIDTH)
        self._inner.hide()
        column = QVBoxLayout(self._inner)
        column.setContentsMargins(28, 18, 28, 28)
        column.setSpacing(0)
        head = QHBoxLayout()
        head.setSpacing(14)
        head.addWidget(self.name, 1)
        head.addWidget(self.state)
        column.addLayout(head)
        column.addWidget(self.fault)
        column.addSpacing(18)
        column.addWidget(self.essentials)
        column.addSpacing(22)
        column.addWidget(_rule())
        column.addSpacing(10)
        column.addLayout(self._search_row())
        column.addWidget(self.form)
        column.addStretch()
        whole = QWidget()
        row = QHBoxLayout(whole)
        row.setContentsMargins(0, 0, 0, 0)
        row.addWidget(self._inner, 1)
        row.addWidget(self.empty_state, 1)
        row.addStretch()
        self.setWidget(whole)
        self.setMinimumWidth(_MIN_WIDTH)

    def _build_name(self) -> None:
        font = QFont(self.name.font())
        font.setPointSizeF(font.pointSizeF() * 1.5)
        font.setWeight(QFont.Weight.DemiBold)
        self.name.setFont(font)
        self.name.setAccessibleName(self.tr("Name of the LoRA"))
        self.name.setPlaceholderText(self.tr("Name of the LoRA"))
        self.name.setToolTip("name\n" + self.tr("The name of the LoRA, its files and its run."))

    def _search_row(self) -> QHBoxLayout:
        self.all.setText(self.tr("All settings"))
        self.all.setCheckable(True)
        self.all.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextBesideIcon)
        self.all.setIconSize(QSize(16, 16))
        self.all.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        set_icon(self.all, "right")
        self.search.setPlaceholderText(self.tr("Search all settings"))
        self.search.setAccessibleName(self.tr("Search all settings"))
        self.search.setClearButtonEnabled(True)
        self.search.setFixedWidth(220)
        row = QHBoxLayout()
        row.setSpacing(10)
        row.addWidget(self.all)
        row.addWidget(self.differences)
        row.addStretch()
        row.addWidget(self.search)
        return row


class NoJobState(QWidget):
    """Empty state that the sheet shows while no job is open."""

    def __init__(self) -> None:
        super().__init__()
        title, words = (
            QLabel(self.tr("No job is open")),
            QLabel(self.tr("A job describes what to train: base, images and settings.")),
        )
        title.setProperty("role", "title")
        words.setProperty("role", "muted")
        self.button = QPushButton(self.tr("New job"))
        center(self, title, words, self.button)


def _rule() -> QFrame:
    line = QFrame()
    line.setObjectName("rule")
    line.setFixedHeight(1)
    return line
