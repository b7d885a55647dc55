"""Colors, style and icons. Widgets with their own painting call `colors()` each time they paint.

    from app.qt.theme import colors, set_icon
    painter.fillRect(rectangle, QColor(colors().base))
    set_icon(button, "search")            # follows the theme; names are the files in app/qt/icons

Labels are styled by a property: label.setProperty("role", "title" | "heading" | "muted" | "good" | "warning" | "bad").
"""

from app.qt.theme.palettes import Colors
from app.qt.theme.theme import Theme, colors, icon, set_icon

__all__ = ["Colors", "Theme", "colors", "icon", "set_icon"]
