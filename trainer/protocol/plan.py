"""Define a plan's remarks and memory advice as codes and values, which each consumer turns into text.

`python -m trainer plan --json` and the plan server send these as JSON. The command line turns them into text in
trainer/cli/plan_text.py, the window in app/qt/train/words.py. A test checks that both have texts for every code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from trainer.protocol.records import json_keys

REMARKS: Mapping[str, tuple[str, ...]] = {
    "search.incomplete": (),  # time ran out before every fit was tried: a better one may exist
    "alternatives.incomplete": (),  # time ran out before every alternative to the pick was tried
    "fit.experiment": ("key",),  # the forecast leaves out the effect of this setting
    "base.assumed": ("family",),  # the base is not on this PC: the published architecture is planned for
    "dataset.unreadable": ("images",),  # so many square images are planned for
    "dataset.empty": ("images",),
    "dataset.assumed": ("images", "prompts"),  # a plan without a job
    "smaller.phase": ("phase", "bytes"),  # no plan needs much less, because this phase needs so much in each
    "smaller.none": (),
    "captions.lengths": ("lengths",),  # how many captions of an epoch are padded to how many tokens
    "text_encoders.stop": ("step", "bytes", "duration"),  # what the run needs less once text encoders are not trained
    "cache.shards": ("epochs", "limit", "encoded", "rounds", "offloaded"),
    "cache.parts": ("limit", "encoded", "rounds", "offloaded"),  # an epoch is split into several shards
    "estimate.cpu": ("error",),  # the share by which the seconds may be off
    "estimate.int8_products": (),
}
"""Codes of remarks, each with the names of its values."""


@json_keys("code", "values")
@dataclass(frozen=True, slots=True)
class Remark:
    """Assumption or limitation of a plan."""

    code: str
    values: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Bytes, counts and names as plain data.

    The value `encoded` is a list of "images", "captions" or both, `lengths` one of [tokens, captions].
    """

    def __post_init__(self) -> None:
        """Raise ValueError for an unknown code or values that do not match it."""
        if self.code not in REMARKS or set(self.values) != set(REMARKS[self.code]):
            raise ValueError(f"no remark has the code {self.code!r} and the values {sorted(self.values)}")


AdviceCode = Literal["close", "close_some", "free", "larger_gpu"]
ADVICE_CODES: tuple[AdviceCode, ...] = get_args(AdviceCode)


@json_keys("code", "bytes", "programs")
@dataclass(frozen=True, slots=True)
class MemoryAdvice:
    """Advice on how to free the additional GPU memory that a plan needs."""

    code: AdviceCode
    """close: closing these programs frees enough. close_some: closing some of them may free enough, but the driver does
    not report how much each uses. free: no program is known to use enough. larger_gpu: closing all would not suffice.
    """
    bytes: int
    """For `close`, the bytes that the programs use; otherwise, the bytes to free."""
    programs: tuple[str, ...] = ()


@json_keys("reserved", "budget", "seconds", "fits")
@dataclass(frozen=True, slots=True)
class PlanEstimate:
    """What a plan is likely to need, judged by a similar recipe before its own memory traces are known."""

    reserved: int
    """Bytes that the run reserves at most."""
    budget: int
    """Bytes that it may use."""
    seconds: float
    fits: bool | None
    """Whether the run is likely to fit; None if the estimate is too close to the budget to say."""


PeakReason = Literal["not_quantized", "small_output", "lower_than_middle", "not_reached"]


@json_keys("peak", "occurs", "bytes", "moment", "reason")
@dataclass(frozen=True, slots=True)
class KnownPeak:
    """One of the nine kinds of memory peaks that Salisbury (2024) found when fine-tuning language models.

    `docs/memory.md` describes them and says which can occur when a LoRA for a diffusion model is trained.
    """

    peak: str
    """The letter in the paper, from A to I."""
    occurs: bool
    """Whether memory peaks at this moment, so that it may be what limits a GPU."""
    bytes: int | None = None
    """Allocated bytes at this moment, whether or not it is a peak; None if the run has no such moment."""
    moment: str = ""
    """Name of the moment, as in the peaks of a forecast; empty if the run has no such moment."""
    reason: PeakReason | None = None
    """Why it does not occur. not_quantized: the base is loaded unquantized. small_output: the loss is computed from a
    prediction as small as the latents, where a language model predicts a number for each word of its vocabulary.
    lower_than_middle: the middle of the same block's backward is higher. not_reached: no adapter weight needs it.
    """
