"""The commands of the caption editor."""

from __future__ import annotations

from app.qt.actions.commands import Action
from app.qt.widgets import QT_TRANSLATE_NOOP

ACTIONS = (
    Action(
        "captions.type",
        QT_TRANSLATE_NOOP("Action", "Type a tag"),
        "captions",
        "type_tag",
        keys=("/", "Ctrl+T"),
        enabled="has_pictures",
        icon="tag",
    ),
    Action(
        "captions.write",
        QT_TRANSLATE_NOOP("Action", "Write the caption as text"),
        "captions",
        "write_text",
        keys=("Ctrl+E",),
        enabled="has_one",
        icon="caption",
    ),
    Action(
        "captions.next_without",
        QT_TRANSLATE_NOOP("Action", "Next picture without caption"),
        "captions",
        "next_without",
        keys=("Ctrl+J",),
        enabled="has_shown",
        icon="right",
    ),
    Action(
        "captions.lines",
        QT_TRANSLATE_NOOP("Action", "Each line is a caption of its own"),
        "captions",
        "read_lines",
        checked="are_variants",
        tip=QT_TRANSLATE_NOOP("Action", "Read the lines of a caption file as alternatives, as a job may ask for"),
    ),
    Action(
        "captions.many",
        QT_TRANSLATE_NOOP("Action", "Change many captions…"),
        "captions",
        "change_many",
        keys=("Ctrl+H",),
        enabled="has_any",
        icon="sort",
    ),
    Action(
        "captions.restore",
        QT_TRANSLATE_NOOP("Action", "Restore original captions…"),
        "captions",
        "restore",
        enabled="has_any",
        icon="refresh",
    ),
    Action(
        "captions.retry",
        QT_TRANSLATE_NOOP("Action", "Try again to save"),
        "captions",
        "retry",
        enabled="has_problems",
        icon="save",
    ),
    Action(
        "captions.conflicts",
        QT_TRANSLATE_NOOP("Action", "Choose between two versions…"),
        "captions",
        "choose",
        enabled="has_conflicts",
        icon="compare",
    ),
    Action(
        "captions.recovered",
        QT_TRANSLATE_NOOP("Action", "Show what was recovered…"),
        "captions",
        "show_recovered",
        enabled="has_recovered",
        icon="info",
    ),
)
