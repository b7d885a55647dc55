"""Test that the window formats durations and memory as the command line does."""

from pathlib import Path

import pytest

import app.qt
from app.qt.widgets import format_duration, format_memory
from trainer.protocol.text import duration_text, size


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


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (3 << 20, "3.0 MiB"),
        (480 << 20, "480 MiB"),
        ((1 << 30) - 1, "1.0 GiB"),
        (7.5 * (1 << 30), "7.5 GiB"),
        (141 << 30, "141 GiB"),
    ],
)
def test_memory_has_one_unit(qapp, count, text):
    assert format_memory(count) == size(count) == text


def test_no_size_in_powers_of_1024_is_called_gb():
    sources = Path(app.qt.__file__).parent.rglob("*.py")
    assert [path for path in sources if "DataSizeTraditionalFormat" in path.read_text(encoding="utf-8")] == []
