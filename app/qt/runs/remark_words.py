"""The words for what a run had to remark."""

from __future__ import annotations

import json

from PySide6.QtCore import QCoreApplication, QLocale

from app.core.runs.run import Remark
from app.core.words import in_words
from app.qt.words import QT_TRANSLATE_NOOP as _NOOP
from trainer.protocol import events

translate = QCoreApplication.translate

_REASONS = {
    "loss": _NOOP("Remarks", "the loss was no finite number"),
    "gradient": _NOOP("Remarks", "the gradient was no finite number"),
    "scale": _NOOP("Remarks", "the loss scale was too high for fp16, and was lowered"),
}
_SLOWNESS = {
    "spilled": _NOOP("Remarks", "the card is full, and its driver may use main memory instead"),
    "others": _NOOP("Remarks", "other programs use the card"),
    "hot": _NOOP("Remarks", "the card is hot and slows itself down"),
    "unknown": _NOOP("Remarks", "no reason is known; look for other programs and for power saving"),
}
_WORKS = {
    "load": _NOOP("Remarks", "loading"),
    "quantise": _NOOP("Remarks", "quantising the base"),
    "cache_pictures": _NOOP("Remarks", "encoding pictures"),
    "cache_texts": _NOOP("Remarks", "encoding captions"),
    "first_step": _NOOP("Remarks", "the first step"),
    "train": _NOOP("Remarks", "training"),
    "validate": _NOOP("Remarks", "measuring"),
    "preview": _NOOP("Remarks", "drawing previews"),
    "checkpoint": _NOOP("Remarks", "writing a checkpoint"),
    "save": _NOOP("Remarks", "saving"),
}
_STAGES = {
    "decode": _NOOP("Remarks", "decoding {rate}"),
    "encode": _NOOP("Remarks", "encoding {rate}"),
    "write": _NOOP("Remarks", "writing {rate}"),
}


def sentence(remark: Remark) -> str:
    """Return a remark as a sentence or two."""
    match remark.event:
        case events.ErrorEvent() as event:
            return in_words(event)
        case events.Notice() as event:
            return event.sentence
        case events.Cached() as event:
            return _cached(event)
        case events.Skipped() as event:
            return _skipped(event, remark)
        case events.MemoryExhausted() as event:
            return _exhausted(event)
        case events.SteppedDown() as event:
            return _stepped_down(event)
        case events.Slow() as event:
            return _slow(event)
        case events.CommandEvent() as event:
            return translate("Remarks", "“{name}” was not done: {detail}").format(
                name=event.name, detail=event.detail or event.outcome
            )
    raise AssertionError(remark)


def _cached(event: events.Cached) -> str:
    if event.phase == "cache_pictures":
        words = translate("Remarks", "Pictures encoded: {count} in {seconds} s, {rate} a second.")
    else:
        words = translate("Remarks", "Captions encoded: {count} in {seconds} s, {rate} a second.")
    seconds = QLocale().toString(event.seconds, "f", 1)
    told = words.format(count=_number(event.count), seconds=seconds, rate=_rate(event.rate))
    stages = [translate("Remarks", _STAGES[name]).format(rate=_rate(limit)) for name, limit in event.limits.items()]
    if not stages:
        return told
    alone = translate("Remarks", "So many a second each stage would do by itself: {stages}.")
    return f"{told} {alone.format(stages=', '.join(stages))}"


def _skipped(event: events.Skipped, remark: Remark) -> str:
    reason = translate("Remarks", _REASONS.get(event.reason, event.reason))
    last = remark.last
    if isinstance(last, events.Skipped):
        words = translate("Remarks", "{count} steps from {first} to {last} changed nothing: {reason}.")
        return words.format(
            count=_number(remark.times), first=_number(event.step), last=_number(last.step), reason=reason
        )
    return translate("Remarks", "Step {step} changed nothing: {reason}.").format(
        step=_number(event.step), reason=reason
    )


def _exhausted(event: events.MemoryExhausted) -> str:
    told = [translate("Remarks", _WORKS.get(event.phase, event.phase)), event.stage, event.module]
    words = translate("Remarks", "Memory ran out after step {step} ({where}).")
    parts = [words.format(step=_number(event.step), where=", ".join(part for part in told if part))]
    if event.requested:
        parts.append(translate("Remarks", "{size} more were needed.").format(size=_size(event.requested)))
    if event.reserved is not None and event.forecast is not None:
        words = translate("Remarks", "{taken} were taken, {forecast} forecast.")
        parts.append(words.format(taken=_size(event.reserved), forecast=_size(event.forecast)))
    return " ".join(parts)


def _stepped_down(event: events.SteppedDown) -> str:
    keys = ", ".join(f"fit.{key} = {json.dumps(value)}" for key, value in event.changes.items())
    if "quantise" in event.changes:
        cost = translate("Remarks", "A base in fewer bits costs some fidelity.")
    elif "vae_encode_tiling" in event.changes:
        cost = translate("Remarks", "Latents of images encoded in tiles differ by about 5 %.")
    else:
        cost = (
            translate("Remarks", "The result stays the same.")
            if event.exact
            else translate("Remarks", "The result differs by rounding.")
        )
    words = translate("Remarks", "It goes on from step {step} in a way that needs less memory: {keys}.")
    return f"{words.format(step=_number(event.step + 1), keys=keys)} {cost}"


def _slow(event: events.Slow) -> str:
    words = translate("Remarks", "Steps became slow at step {step} ({now} s instead of {usual} s): {reason}.")
    reason = translate("Remarks", _SLOWNESS.get(event.reason, _SLOWNESS["unknown"]))
    now, usual = QLocale().toString(event.seconds, "f", 1), QLocale().toString(event.median, "f", 1)
    told = f"{reason} ({event.detail})" if event.detail else reason
    return words.format(step=_number(event.step), now=now, usual=usual, reason=told)


def _size(number: int) -> str:
    return QLocale().formattedDataSize(number, 1, QLocale.DataSizeFormat.DataSizeTraditionalFormat)


def _rate(number: float) -> str:
    """Three digits, and no decimals of hundreds."""
    return QLocale().toString(number, "f", 0) if number >= 100 else QLocale().toString(number, "g", 3)


def _number(number: int) -> str:
    return QLocale().toString(number)
