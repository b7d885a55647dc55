"""Every colour of the app, three times: light, dark, high contrast. Nothing else in the app names a colour.

Neutral greys, so that they do not tint how a picture is seen, and one accent. `PAIRS` says which text stands on which
ground and which shape must be told from what is beside it; a test computes the contrast of each (WCAG 2.2, 1.4.3 and
1.4.11): 4.5:1 for text, 3:1 for edges, focus rings and icons.
"""

from __future__ import annotations

from dataclasses import dataclass

_GROUNDS = ("window", "rail", "base", "raised", "hover", "pressed")


@dataclass(frozen=True, slots=True)
class Colours:
    """Roles, each a hex colour; delegates that paint by themselves take theirs from here too."""

    window: str
    """Panels and the space around things."""
    rail: str
    """The strip of pages, the status line."""
    base: str
    """What one writes or looks into: fields, lists, the ground behind pictures."""
    raised: str
    """Buttons, chips, headers."""
    hover: str
    pressed: str
    """Also what is switched on."""
    line: str
    """Separates panels; only decoration."""
    edge: str
    """The outline of fields and buttons."""
    text: str
    muted: str
    """Text of less weight: counts, hints, units, placeholders."""
    disabled: str
    """Text of what cannot be used now; exempt from the contrasts, as WCAG has it."""
    accent: str
    """The one colour: the default button, what is selected, progress."""
    on_accent: str
    focus: str
    """The ring around what has the keyboard."""
    link: str
    good: str
    warning: str
    bad: str
    series1: str
    """Lines of charts, in the order in which they are taken; told apart by those who see red and green alike, too."""
    series2: str
    series3: str
    series4: str
    series5: str
    series6: str


LIGHT = Colours(
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

DARK = Colours(
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

CONTRAST = Colours(
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
    *((text, ground) for text in ("text", "muted") for ground in _GROUNDS),
    *((text, ground) for text in ("link", "good", "warning", "bad") for ground in ("window", "base", "raised")),
    ("on_accent", "accent"),
)
SHAPES: tuple[tuple[str, str], ...] = (
    *(("edge", ground) for ground in ("window", "base", "raised")),
    *(("focus", ground) for ground in _GROUNDS),
    *((icon, ground) for icon in ("text", "muted") for ground in _GROUNDS),
    *(("accent", ground) for ground in ("base",)),
    *((f"series{number}", "base") for number in range(1, 7)),
)


_in_force = LIGHT


def colours() -> Colours:
    """Return the colours in force now."""
    return _in_force


def put_in_force(chosen: Colours) -> None:
    """Remember the colours that `Theme` has given to Qt."""
    global _in_force
    _in_force = chosen
