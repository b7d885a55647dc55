"""The plan in force: the frozen job's fit settings and the fallback steps applied to them so far."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.config.fit import FallbackStep, FitConfig
from trainer.config.job import Job
from trainer.config.resolve import FIT_NUMERICS
from trainer.dataset.cache_keys import text_batch_size
from trainer.protocol.forecast import ForecastPhase
from trainer.protocol.records import renamed

QUANTIZATION = ("none", "int8_products", "int8", "nf4")

_BASE = frozenset({"quantize", "stream"})
_TRAINING = frozenset({"gradient_checkpointing", "micro_batch", *_BASE})
# The keys that can lower the peak of each phase. A fallback step with none of them would cost speed or precision for
# nothing.
HELPFUL_KEYS: Mapping[ForecastPhase, frozenset[str]] = {
    "cache_pictures": frozenset({"vae_dtype", "vae_encode_tiling"}),
    "cache_texts": frozenset({"text_encoder_batch_size"}),
    "first_step": _TRAINING,
    "train": _TRAINING,
    "validate": frozenset({"micro_batch", *_BASE}),
    "preview": frozenset({"vae_tiling", "preview_offload", *_BASE}),
    "load": _BASE,
    "quantise": _BASE,
    "checkpoint": _BASE,
    "save": _BASE,
}


@dataclass(frozen=True, slots=True)
class AppliedFallback:
    """A fallback step that was applied."""

    step: int
    """First optimizer step (from 0) that it applies to."""
    number: int
    """Position among the plan's fallback steps, from 1."""
    fallback: FallbackStep


@dataclass(slots=True)
class ActivePlan:
    """The fit settings that a run began with, its fallback steps, and those applied so far."""

    frozen: FitConfig
    fallbacks: tuple[FallbackStep, ...]
    applied: list[AppliedFallback] = field(default_factory=list)
    """Applied fallback steps, ordered by optimizer step; the list is replaced, never modified, so copies stay valid."""

    saved: list[AppliedFallback] = field(default_factory=list)
    """Applied fallback steps in the checkpoint that the attempt began with."""

    @classmethod
    def of(cls, job: Job) -> ActivePlan:
        """Return the plan of a frozen job, whose fallback steps were chosen when it started."""
        return cls(job.fit, job.fallbacks)

    def at(self, step: int) -> FitConfig:
        """Return the fit settings in force at optimizer step ``step`` (from 0), including when it is replayed."""
        fit = self.frozen
        for taken in self.applied:
            if taken.step <= step:
                fit = fit.replaced(**changes_of(fit, taken.fallback))
        return fit

    def step_down(self, step: int, phase: ForecastPhase) -> tuple[AppliedFallback, Mapping[str, Any]] | None:
        """Apply the next fallback step that helps ``phase``, from ``step`` on; return it and its changes.

        During a replay this may be a fallback step that was first applied at a later step; it then applies from
        ``step`` on. Returns None if no fallback step is left.
        """
        fit = self.at(step)
        past = {taken.number for taken in self.applied if taken.step <= step}
        for number, fallback in enumerate(self.fallbacks, 1):
            changes = changes_of(fit, fallback)
            if number not in past and HELPFUL_KEYS.get(phase, frozenset()) & changes.keys():
                taken = AppliedFallback(step, number, fallback)
                others = [other for other in self.applied if other.number != number]
                self.applied = sorted([*others, taken], key=lambda one: one.step)
                return taken, changes
        return None

    def forbidden(self, step: int, phase: ForecastPhase) -> dict[str, Any]:
        """Return the changes that would help ``phase`` at ``step`` but are prevented by keys that the user set.

        Contains the smallest change of each key. Keys that cannot be changed when a run is resumed, such as the base's
        quantization, are left out.
        """
        fit, helps = self.at(step).replaced(allow_quantized=False), HELPFUL_KEYS.get(phase, frozenset())
        changes: dict[str, Any] = {}
        for fallback in implied_fallbacks(fit, FitConfig()):
            for key, value in changes_of(fit, fallback).items():
                if key in helps and key not in FIT_NUMERICS:
                    changes.setdefault(key, value)
        return changes

    def state(self) -> list[dict[str, object]]:
        """Return the applied fallback steps in the form stored in checkpoints."""
        return [
            {"step": taken.step, "number": taken.number, "fallback": taken.fallback.model_dump(mode="json")}
            for taken in self.applied
        ]

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the plan from a checkpoint's state."""
        self.applied = self.saved = applied_fallbacks(state)


def applied_fallbacks(state: Mapping[str, Any]) -> list[AppliedFallback]:
    """Return the fallback steps in a checkpoint's state.

    Version 0.1.0 stored them as "rungs"; checkpoints of earlier versions have none.

    Raises ValueError, TypeError, LookupError or AttributeError for damaged data.
    """
    return [
        AppliedFallback(
            int(entry["step"]),
            int(entry["number"]),
            FallbackStep.model_validate(renamed(entry[key.removesuffix("s")], "ladder")),
        )
        for key in ("fallbacks", "rungs")
        for entry in state.get(key, ())
    ]


def changes_of(fit: FitConfig, fallback: FallbackStep) -> dict[str, Any]:
    """Return the keys and values that ``fallback`` changes in ``fit``, except those that would not save memory."""
    changes = {name: value for name, value in fallback if name != "exact" and value is not None}
    return {name: value for name, value in changes.items() if _needs_less(fit, name, value)}


def _needs_less(fit: FitConfig, name: str, value: Any) -> bool:
    current = getattr(fit, name)
    match name:
        case "micro_batch":
            return bool(value < (current or 1))
        case "gradient_checkpointing":
            return current != "full" and value not in ("none", current)
        case "vae_dtype":
            return bool(current != value)
        case "text_encoder_batch_size":
            return bool(value < text_batch_size(fit))
        case "stream":
            return bool(current != value)
        case "quantize":
            return fit.allow_quantized and QUANTIZATION.index(value) > QUANTIZATION.index(current or "none")
        case _:
            return bool(value) and not current


def implied_fallbacks(fit: FitConfig, written: FitConfig) -> Iterator[FallbackStep]:
    """Yield the fallback steps for fit settings that no plan chose.

    Steps that do not change the result and cost little time come first, then halved micro-batches, then streaming,
    which does not change the result but is slow, then a quantized base, then the steps that only affect encoding.
    Keys that the user has ``written`` are never changed (docs/decisions/0008).
    """
    if written.vae_tiling is None:
        yield FallbackStep(exact=True, vae_tiling=True)
    if written.preview_offload is None and fit.device != "cpu":
        yield FallbackStep(exact=True, preview_offload=True)
    if written.gradient_checkpointing is None:
        yield FallbackStep(exact=True, gradient_checkpointing="full")
    size = fit.micro_batch or 1
    while size > 1 and written.micro_batch is None:
        size = math.ceil(size / 2)
        yield FallbackStep(exact=False, micro_batch=size)
    if written.stream is None and fit.device != "cpu":
        yield FallbackStep(exact=True, stream="full")
    if fit.allow_quantized and written.quantize is None:
        yield FallbackStep(exact=False, quantize="int8")
        yield FallbackStep(exact=False, quantize="nf4")
    yield from encoding_fallbacks(fit, written)


def encoding_fallbacks(fit: FitConfig, written: FitConfig) -> Iterator[FallbackStep]:
    """Yield the fallback steps for encoding.

    First images are encoded in bf16, then also in tiles, which changes the latents more, then captions one at a time.
    bf16 is offered only if the base uses it too, because the GPU is then known to support it.
    """
    if fit.dtype == "bf16" and fit.vae_dtype != "bf16" and written.vae_dtype is None:
        yield FallbackStep(exact=False, vae_dtype="bf16")
    if not fit.vae_encode_tiling and written.vae_encode_tiling is None:
        yield FallbackStep(exact=False, vae_encode_tiling=True)
    if text_batch_size(fit) > 1 and written.text_encoder_batch_size is None:
        yield FallbackStep(exact=False, text_encoder_batch_size=1)
