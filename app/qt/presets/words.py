"""How presets and what they cost are worded."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import lru_cache

from PySide6.QtCore import QCoreApplication

from app.core.jobs.settings import full_title, setting
from app.core.planning.forecaster import HERE
from app.core.presets.outlooks import Outlook
from app.qt.train.forecast.words import duration, figure, fit, gigabytes, headline
from app.qt.words import QT_TRANSLATE_NOOP
from trainer.config.presets.library import Origin
from trainer.config.presets.preset import Preset
from trainer.config.schema import fields

ORIGINS: Mapping[Origin, str] = {
    "yours": QT_TRANSLATE_NOOP("Presets", "yours"),
    "received": QT_TRANSLATE_NOOP("Presets", "received"),
    "built-in": QT_TRANSLATE_NOOP("Presets", "comes with Impasto"),
}


def origin_words(origin: Origin) -> str:
    """Return where a preset comes from."""
    return QCoreApplication.translate("Presets", ORIGINS[origin])


def by(preset: Preset) -> str:
    """Return who made it and under which licence."""
    author = (
        QCoreApplication.translate("Presets", "by {author}").format(author=preset.author)
        if preset.author
        else QCoreApplication.translate("Presets", "by nobody named")
    )
    licence = preset.licence or QCoreApplication.translate("Presets", "no licence stated")
    return f"{author} · {licence}"


def in_short(outlook: Outlook | None) -> str:
    """Return what a preset costs, for one line of its card."""
    if outlook is None:
        return QCoreApplication.translate("Presets", "Working out what it costs…")
    answer = outlook.answer
    if answer is None:
        return outlook.problem
    if answer.pick is None:
        return QCoreApplication.translate("Presets", "Does not fit: {missing} are missing").format(
            missing=gigabytes(answer.missing)
        )
    if answer.on_cpu:
        about = QCoreApplication.translate("Presets", "About {time} on the CPU")
        return about.format(time=duration(answer.pick.forecast.seconds))
    words = QCoreApplication.translate("Presets", "About {time}, {needed} of {free} GB")
    time, needed = duration(answer.pick.forecast.seconds), figure(answer.pick.needed)
    told = words.format(time=time, needed=needed, free=figure(answer.card.free))
    return (
        told
        if answer.pick.quality == "exact"
        else QCoreApplication.translate("Presets", "{told}, base rounded").format(told=told)
    )


def in_full(outlook: Outlook | None, card: str) -> str:
    """Return what a preset costs and how it is fitted, in sentences."""
    if outlook is None:
        return QCoreApplication.translate("Presets", "Working out how it would be fitted…")
    if outlook.answer is None:
        return outlook.problem
    answer = outlook.answer
    told = [headline(answer, here=card == HERE)]
    if answer.pick is not None and not answer.on_cpu:
        told.append(
            QCoreApplication.translate("Presets", "It will be fitted as: {fit}.").format(
                fit=fit(answer.pick.fit, answer.effective_batch)
            )
        )
    elif answer.lighter is not None:
        changes = ", ".join(f"{full_title(key)} {value}" for key, value in answer.changes.items())
        told.append(QCoreApplication.translate("Presets", "It would fit with {changes}.").format(changes=changes))
    if answer.on_cpu:
        told.append(QCoreApplication.translate("Presets", "No NVIDIA GPU was found, so training uses the CPU."))
    return " ".join(told)


@lru_cache(maxsize=1)
def key_docs() -> Mapping[str, str]:
    """Return what each key of a preset means."""
    return {each.key: each.doc for each in fields(Preset)}


def doc_of(key: str) -> str:
    """Return what a key of a preset, or of its recipe, means; "" where it is not known."""
    docs = key_docs()
    return docs.get(key) or docs.get(f"recipe.{key}") or docs.get(f"fit.{key}") or ""


def choices_of(key: str) -> tuple[object, ...]:
    """Return what a key of a recipe or a fit can be set to, where that is listed; nothing for other keys."""
    for path in (key, f"recipe.{key}", f"fit.{key}"):
        with contextlib.suppress(KeyError):
            return setting(path).choices
    return ()
