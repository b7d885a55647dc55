"""One sample of every remark and advice of a plan, to check that a consumer has a text for each."""

from __future__ import annotations

from itertools import product
from typing import get_args

from trainer.protocol.forecast import ForecastPhase
from trainer.protocol.plan import ADVICE_CODES, REMARKS, MemoryAdvice, Remark

_VALUES = {
    "key": ("fit.compile", "fit.channels_last"),
    "family": ("sd15", "sdxl"),
    "images": (1, 20),
    "prompts": (1, 2),
    "phase": get_args(ForecastPhase),
    "bytes": (5 << 30,),
    "epochs": (1, 3),
    "limit": ("disk", "listing"),
    "encoded": (["images"], ["captions"], ["images", "captions"]),
    "rounds": (1, 4),
    "lengths": ([(75, 50)], [(75, 1), (150, 9)], [(75, 40), (150, 9), (225, 1)]),
    "offloaded": (False, True),
    "error": (0.25,),
    "step": (500,),
    "duration": (90.0,),
}


def every_remark() -> list[Remark]:
    """Return remarks with every code, and with every kind of value that has its own text."""
    return [
        Remark(code, dict(zip(names, values, strict=True)))
        for code, names in REMARKS.items()
        for values in product(*(_VALUES[name] for name in names))
    ]


def every_advice() -> list[MemoryAdvice]:
    """Return advice with every code."""
    return [MemoryAdvice(code, 5 << 30, ("game", "web")) for code in ADVICE_CODES]
