"""Colors, style and icons. Widgets with their own painting call `colours()` each time they paint.

    from app.qt.theme import colours, set_icon
    painter.fillRect(rectangle, QColor(colours().base))
    set_icon(button, "search")            # follows the theme; names are the files in app/qt/icons

Labels are styled by a property: label.setProperty("role", "title" | "heading" | "muted" | "good" | "warning" | "bad").
"""

from app.qt.theme.palettes import Colours
from app.qt.theme.theme import Theme, colours, icon, set_icon

__all__ = ["Colours", "Theme", "colours", "icon", "set_icon"]
