"""The families by name."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.base.family import FamilyFacts
from trainer.base.sd15 import SD15
from trainer.base.sdxl import SDXL
from trainer.config.base import Family

FAMILIES: Mapping[Family, FamilyFacts] = {"sd15": SD15, "sdxl": SDXL}
