"""All colors of the app, for the light, dark and high-contrast themes. No other module defines colors.

The colors are neutral grays, which do not affect how images are perceived, and one accent color. `TEXTS` and `SHAPES`
list which text and shape colors the app uses on which backgrounds; a test computes the contrast of each pair (WCAG 2.2,
1.4.3 and 1.4.11) and requires 4.5:1 for text and 3:1 for edges, focus rings and icons.
"""

from __future__ import annotations

from dataclasses import dataclass

_BACKGROUNDS = ("window", "rail", "base", "raised", "hover", "pressed")


@dataclass(frozen=True, slots=True)
class Colors:
    """Hex colors by role, for the style sheet and for widgets with their own painting."""

    window: str
    """Background of the window and its panels."""
    rail: str
    """Background of the sidebar, menu bar and status bar."""
    base: str
    """Background of fields, lists and images."""
    raised: str
    """Background of buttons, chips and headers."""
    hover: str
    pressed: str
    """Background of pressed and checked buttons."""
    line: str
    """Separators between panels; decorative only."""
    edge: str
    """Outline of fields and buttons."""
    text: str
    muted: str
    """Secondary text: counts, hints, units, placeholders."""
    disabled: str
    """Text of disabled widgets; WCAG exempts it from contrast requirements."""
    accent: str
    """Accent color: the default button, selections, progress."""
    on_accent: str
    focus: str
    """Focus ring."""
    link: str
    good: str
    warning: str
    bad: str
    series1: str
    """First of the chart line colors, which people with red-green color blindness can tell apart too."""
    series2: str
    series3: str
    series4: str
    series5: str
    series6: str


LIGHT = Colors(
    window="#f3f3f4",
    rail="#e9e9eb",
    base="#ffffff",
    raised="#fafafa",
    hover="#e2e2e6",
    pressed="#d5d6dd",
    line="#d4d4d8",
    edge="#84848c",
    text="#1c1c1f",
    muted="#56565e",
    disabled="#9a9aa2",
    accent="#3d55c4",
    on_accent="#ffffff",
    focus="#3d55c4",
    link="#2f46b8",
    good="#1b6e3a",
    warning="#7d5000",
    bad="#b01f1f",
    series1="#3d55c4",
    series2="#c2500b",
    series3="#00796b",
    series4="#a3327f",
    series5="#8a6400",
    series6="#5b5b66",
)

DARK = Colors(
    window="#242427",
    rail="#1d1d20",
    base="#19191b",
    raised="#313136",
    hover="#3a3a40",
    pressed="#46464e",
    line="#38383d",
    edge="#85858f",
    text="#e7e7ea",
    muted="#b4b4bc",
    disabled="#74747c",
    accent="#4c63d2",
    on_accent="#ffffff",
    focus="#93a6ff",
    link="#a9b8ff",
    good="#74d394",
    warning="#eabb5d",
    bad="#ff9c93",
    series1="#93a6ff",
    series2="#ff9f5c",
    series3="#4fd1b5",
    series4="#f08ccb",
    series5="#e6c54a",
    series6="#b9b9c2",
)

CONTRAST = Colors(
    window="#000000",
    rail="#000000",
    base="#000000",
    raised="#000000",
    hover="#2b2b2b",
    pressed="#3d3d3d",
    line="#ffffff",
    edge="#ffffff",
    text="#ffffff",
    muted="#e6e6e6",
    disabled="#9a9a9a",
    accent="#ffd60a",
    on_accent="#000000",
    focus="#ffd60a",
    link="#8fd3ff",
    good="#7cffa4",
    warning="#ffd60a",
    bad="#ffa49c",
    series1="#8fd3ff",
    series2="#ffb000",
    series3="#7cffa4",
    series4="#ff9de2",
    series5="#fff27a",
    series6="#ffffff",
)

TEXTS: tuple[tuple[str, str], ...] = (
    *((text, background) for text in ("text", "muted") for background in _BACKGROUNDS),
    *((text, background) for text in ("link", "good", "warning", "bad") for background in ("window", "base", "raised")),
    ("on_accent", "accent"),
)
SHAPES: tuple[tuple[str, str], ...] = (
    *(("edge", background) for background in ("window", "base", "raised")),
    *(("focus", background) for background in _BACKGROUNDS),
    *((icon, background) for icon in ("text", "muted") for background in _BACKGROUNDS),
    *(("accent", background) for background in ("base",)),
    *((f"series{number}", "base") for number in range(1, 7)),
)


_current = LIGHT


def colors() -> Colors:
    """Return the colors of the current theme."""
    return _current


def set_current(chosen: Colors) -> None:
    """Set the colors that `colors` returns; called by `Theme`."""
    global _current
    _current = chosen
