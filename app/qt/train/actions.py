"""The commands of the Train page."""

from __future__ import annotations

from app.qt.actions.table import Action
from app.qt.words import QT_TRANSLATE_NOOP

ACTIONS = (
    Action(
        "train.new",
        QT_TRANSLATE_NOOP("Action", "New Job"),
        "train",
        "new",
        keys=("Ctrl+N",),
        icon="add",
        tip=QT_TRANSLATE_NOOP("Action", "Set up a training with the pictures that are open"),
    ),
    Action("train.open", QT_TRANSLATE_NOOP("Action", "Open Job File…"), "train", "ask_for_file", icon="folder"),
    Action(
        "train.duplicate",
        QT_TRANSLATE_NOOP("Action", "Duplicate Job"),
        "train",
        "duplicate",
        enabled="has_job",
        icon="copy",
    ),
    Action(
        "train.rename", QT_TRANSLATE_NOOP("Action", "Rename Job"), "train", "rename", keys=("F2",), enabled="has_job"
    ),
    Action(
        "train.delete", QT_TRANSLATE_NOOP("Action", "Delete Job"), "train", "delete", enabled="has_job", icon="trash"
    ),
    Action(
        "train.search",
        QT_TRANSLATE_NOOP("Action", "Find a Setting"),
        "train",
        "find_setting",
        keys=("Ctrl+F",),
        enabled="has_job",
        icon="search",
    ),
    Action(
        "train.start",
        QT_TRANSLATE_NOOP("Action", "Start Training"),
        "train",
        "start",
        keys=("Ctrl+Return",),
        enabled="can_start",
        icon="train",
    ),
)
