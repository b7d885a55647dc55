"""Lengths of time in the window, which the terminal words alike."""

import pytest

from app.qt.widgets import format_duration
from trainer.protocol.text import duration_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "1 s"),
        (0.7, "1 s"),
        (89.4, "89 s"),
        (89.6, "2 min"),
        (90, "2 min"),
        (3_569, "59 min"),
        (3_571, "1 h 00 min"),
        (5_820, "1 h 37 min"),
        (86_300, "23 h 58 min"),
        (86_399, "1 d 0 h"),
        (3 * 86_400 + 4.2 * 3_600, "3 d 4 h"),
    ],
)
def test_a_length_of_time_has_one_wording(qapp, seconds, text):
    assert format_duration(seconds) == duration_text(seconds) == text
