"""Screens of the Images page's smaller dialogs, and of its other views."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtWidgets import QApplication, QWidget

from app.core.edits.history import Edit
from app.core.edits.save_state import Key, SaveRequest
from app.core.library import ValueChange
from app.core.session import Session
from app.qt.images.captions.recovery_dialogs import ConflictsDialog, RecoveredDialog
from app.qt.images.dialogs import FolderDialog
from app.qt.images.finding.filter_box import HelpDialog, SaveDialog
from app.qt.window import Window
from tests.support.screens import screen, wait


def clash(session: Session) -> list[ValueChange]:
    """Let another program and the user write the same captions; return what the user changed."""
    session.saver.flush()
    wait(QApplication.instance(), lambda: session.saver.now.clean)
    changes = []
    for number in session.view.ids[:3]:
        picture = session.library.images[number]
        words = (picture.caption or "").strip()
        picture.path.with_suffix(".txt").write_text(f"{words}, at night, in the rain", encoding="utf-8")
        changes.append(ValueChange(number, "caption", picture.caption, f"a close-up, {words}"))
    session.history.do(Edit("Write captions", tuple(changes)))
    session.saver.flush()
    wait(QApplication.instance(), lambda: len(session.saver.now.conflicts) == len(changes))
    return changes


def make_up(session: Session, changes: Sequence[ValueChange]) -> None:
    """Resolve the conflicts, and restore the captions."""
    session.history.resolve([(one, one.mine) for one in session.saver.now.conflicts], "Keep mine")
    session.history.do(Edit("Write captions", tuple(change.inverse() for change in changes)))
    session.saver.flush()
    wait(QApplication.instance(), lambda: session.saver.now.clean)


@screen("captions-conflicts")
def captions_conflicts(window: Window) -> QWidget:
    window.show_images()
    changes = clash(window.session)
    dialog = ConflictsDialog(window.session, window)
    dialog.finished.connect(lambda _: make_up(window.session, changes))
    return dialog


@screen("captions-recovered")
def captions_recovered(window: Window) -> QWidget:
    session = window.session
    requests = []
    for number in session.view.ids[:4]:
        picture = session.library.images[number]
        key = Key(str(picture.folder.root), picture.name, "caption")
        words = (picture.caption or "").strip()
        requests.append(SaveRequest(key, (words,), f"{words}, glowing"))
    session.saver.recovered = tuple(requests)
    return RecoveredDialog(session, window)


@screen("filter-save")
def filter_save(window: Window) -> QWidget:
    return SaveDialog("tag:neon size:<512 -missing:caption", list(window.session.datasets.folders), window)


@screen("filter-help")
def filter_help(window: Window) -> QWidget:
    return HelpDialog(window)


@screen("folder")
def folder(window: Window) -> QWidget:
    return FolderDialog(next(iter(window.session.library.images.values())).folder, window)


@screen("loupe")
def loupe(window: Window) -> QWidget:
    window.show_images()
    window.session.view.select(window.session.view.ids[:1], window.session.view.ids[0])
    window.commands["views.loupe"].trigger()
    return window


@screen("compare")
def compare(window: Window) -> QWidget:
    window.show_images()
    window.session.view.select(window.session.view.ids[:3], window.session.view.ids[0])
    command = window.commands["views.compare"]
    wait(QApplication.instance(), command.isEnabled)
    command.trigger()
    return window
