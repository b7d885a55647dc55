"""Commands of the main window."""

from __future__ import annotations

from app.qt.actions.commands import Action
from app.qt.widgets import QT_TRANSLATE_NOOP

ACTIONS = (
    Action(
        "window.open",
        QT_TRANSLATE_NOOP("Action", "Open folder…"),
        "file",
        "open_folder",
        keys=("Ctrl+O",),
        icon="folder-add",
        tip=QT_TRANSLATE_NOOP("Action", "Open a folder of images; you can also drop it on the window"),
    ),
    Action(
        "window.lora",
        QT_TRANSLATE_NOOP("Action", "Inspect a LoRA…"),
        "file",
        "open_lora",
        icon="eye",
        tip=QT_TRANSLATE_NOOP(
            "Action", "Show the type, strength and metadata of a LoRA file; you can also drop it on the window"
        ),
    ),
    Action(
        "window.preferences",
        QT_TRANSLATE_NOOP("Action", "Preferences…"),
        "file",
        "show_preferences",
        keys=("Ctrl+,",),
        icon="settings",
    ),
    Action("window.quit", QT_TRANSLATE_NOOP("Action", "Quit"), "file", "close", keys=("Ctrl+Q",)),
    Action(
        "edit.undo",
        QT_TRANSLATE_NOOP("Action", "Undo"),
        "edit",
        "undo",
        keys=("Ctrl+Z",),
        enabled="can_undo",
        icon="undo",
    ),
    Action(
        "edit.redo",
        QT_TRANSLATE_NOOP("Action", "Redo"),
        "edit",
        "redo",
        keys=("Ctrl+Shift+Z", "Ctrl+Y"),
        enabled="can_redo",
        icon="redo",
    ),
    Action(
        "window.images",
        QT_TRANSLATE_NOOP("Action", "Images"),
        "view",
        "show_images",
        keys=("Ctrl+1",),
        icon="images",
    ),
    Action("window.train", QT_TRANSLATE_NOOP("Action", "Train"), "view", "show_train", keys=("Ctrl+2",), icon="train"),
    Action("window.runs", QT_TRANSLATE_NOOP("Action", "Runs"), "view", "show_runs", keys=("Ctrl+3",), icon="runs"),
    Action(
        "window.presets",
        QT_TRANSLATE_NOOP("Action", "Presets"),
        "view",
        "show_presets",
        keys=("Ctrl+4",),
        icon="presets",
    ),
    Action(
        "window.fullscreen",
        QT_TRANSLATE_NOOP("Action", "Full screen"),
        "view",
        "show_full_screen",
        keys=("F11",),
        checked="isFullScreen",
    ),
    Action(
        "window.palette",
        QT_TRANSLATE_NOOP("Action", "Find a command…"),
        "help",
        "show_palette",
        keys=("Ctrl+K",),
        icon="command",
    ),
    Action(
        "window.keys",
        QT_TRANSLATE_NOOP("Action", "Keyboard shortcuts"),
        "help",
        "show_keys",
        keys=("?", "F1"),
        icon="keyboard",
    ),
    Action("window.welcome", QT_TRANSLATE_NOOP("Action", "Welcome…"), "help", "show_welcome", icon="info"),
    Action(
        "window.tour",
        QT_TRANSLATE_NOOP("Action", "Take the tour"),
        "help",
        "show_tour",
        icon="help",
        tip=QT_TRANSLATE_NOOP("Action", "Train a small LoRA on any PC, step by step, in a few minutes"),
    ),
)
