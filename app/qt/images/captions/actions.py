"""Commands for the caption editor."""

from __future__ import annotations

from app.qt.actions.commands import Action
from app.qt.widgets import QT_TRANSLATE_NOOP

ACTIONS = (
    Action(
        "captions.type",
        QT_TRANSLATE_NOOP("Action", "Type a tag"),
        "captions",
        "focus_tags",
        keys=("/", "Ctrl+T"),
        enabled="has_images",
        icon="tag",
    ),
    Action(
        "captions.write",
        QT_TRANSLATE_NOOP("Action", "Edit caption as text"),
        "captions",
        "focus_text",
        keys=("Ctrl+E",),
        enabled="has_one",
        icon="caption",
    ),
    Action(
        "captions.next_without",
        QT_TRANSLATE_NOOP("Action", "Next image without caption"),
        "captions",
        "next_without",
        keys=("Ctrl+J",),
        enabled="has_shown",
        icon="right",
    ),
    Action(
        "captions.lines",
        QT_TRANSLATE_NOOP("Action", "Each line is a separate caption"),
        "captions",
        "read_lines",
        checked="are_variants",
        tip=QT_TRANSLATE_NOOP(
            "Action", "Treat each line of a caption file as an alternative caption, as set in the job"
        ),
    ),
    Action(
        "captions.many",
        QT_TRANSLATE_NOOP("Action", "Edit many captions…"),
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
        QT_TRANSLATE_NOOP("Action", "Try saving again"),
        "captions",
        "retry",
        enabled="has_problems",
        icon="save",
    ),
    Action(
        "captions.conflicts",
        QT_TRANSLATE_NOOP("Action", "Resolve conflicts…"),
        "captions",
        "choose",
        enabled="has_conflicts",
        icon="compare",
    ),
    Action(
        "captions.recovered",
        QT_TRANSLATE_NOOP("Action", "Show recovered edits…"),
        "captions",
        "show_recovered",
        enabled="has_recovered",
        icon="info",
    ),
)
