"""Words lengths of time and moments, as short as they tell enough."""

from __future__ import annotations

from PySide6.QtCore import QCoreApplication, QDateTime, QLocale

from trainer.protocol.units import parts


def duration(seconds: float) -> str:
    """Word a length of time no finer than it tells something: "40 s", "12 min", "2 h 05 min", "3 d 4 h"."""
    days, hours, minutes, rest = parts(seconds)
    if days:
        return _tr("{days} d {hours} h").format(days=days, hours=hours)
    if hours:
        return _tr("{hours} h {minutes} min").format(hours=hours, minutes=f"{minutes:02d}")
    if minutes:
        return _tr("{minutes} min").format(minutes=minutes)
    return _tr("{seconds} s").format(seconds=rest)


def moment(unix: float, now: float) -> str:
    """Word a moment of the past: its time where it is of today, else its day too."""
    then, today = QDateTime.fromSecsSinceEpoch(int(unix)), QDateTime.fromSecsSinceEpoch(int(now)).date()
    at = QLocale().toString(then.time(), QLocale.FormatType.ShortFormat)
    days = then.date().daysTo(today)
    if days == 0:
        return at
    if days == 1:
        return _tr("yesterday {time}").format(time=at)
    return QLocale().toString(then.date(), QLocale.FormatType.ShortFormat)


def upcoming(unix: float, now: float) -> str:
    """Word a moment to come: its time where it is of today, else its day too."""
    then, today = QDateTime.fromSecsSinceEpoch(int(unix)), QDateTime.fromSecsSinceEpoch(int(now)).date()
    at = QLocale().toString(then.time(), QLocale.FormatType.ShortFormat)
    days = today.daysTo(then.date())
    if days == 0:
        return at
    if days == 1:
        return _tr("tomorrow {time}").format(time=at)
    return QLocale().toString(then, QLocale.FormatType.ShortFormat)


def _tr(text: str) -> str:
    return QCoreApplication.translate("Durations", text)
