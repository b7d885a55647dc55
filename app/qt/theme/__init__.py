"""Colours, style and icons. Widgets that paint by themselves ask `colours()` each time they paint.

    from app.qt.theme import colours, set_icon
    painter.fillRect(rectangle, QColor(colours().base))
    set_icon(button, "search")            # stays right when the colours change; names: the files of app/qt/icons

Labels take a look by property: label.setProperty("role", "title" | "heading" | "muted" | "good" | "warning" | "bad").
"""

from app.qt.theme.palettes import Colours
from app.qt.theme.theme import Theme, colours, icon, set_icon

__all__ = ["Colours", "Theme", "colours", "icon", "set_icon"]
