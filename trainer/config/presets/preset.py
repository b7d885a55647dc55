"""The preset format: a recipe, a fit, or both, with author, base family, examples and a preview image."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field

from trainer.config.base import Family
from trainer.config.fit import FitConfig
from trainer.config.job import PromptConfig
from trainer.config.recipe import RecipeConfig
from trainer.config.schema import Section
from trainer.config.write import set_key_lines
from trainer.protocol.files import safe_name
from trainer.protocol.text import printable

SCHEMA = 2
LONGEST_NAME = 80
RECIPE_KEY = "impasto_recipe"
"""Metadata key of the complete recipe (JSON) in LoRA files made by Impasto."""

# Fit keys of one machine, which would be wrong on another or reveal something about it.
MACHINE_KEYS = ("device", "threads", "loader_workers", "prefetch_batches", "cache_gigabytes", "int8_products")

TriggerWord = Annotated[str, Field(min_length=1, max_length=100)]
_LONGEST = 4000  # characters of any text; some fields have lower limits
_IMAGE = "preview.image"
_SEVERAL_LINES = {"notes"}
# Characters that reorder text can make it read as something else (CVE-2021-42574), and tag characters spell invisible
# letters; Zl and Zp are line breaks.
_DECEIVING = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\U000e0000-\U000e007f]")
# The flags of England, Scotland and Wales are tag characters after a black flag (UTS #51): a region code and an end
# mark. They are allowed, since so short a text can hide nothing that matters.
_FLAG = re.compile("\U0001f3f4[\U000e0030-\U000e0039\U000e0061-\U000e007a]{3,7}\U000e007f")
# Zero-width characters make different names, trigger words or prompts look alike; notes may contain some.
_UNSEEN = re.compile("[\u115f\u1160\u180e\u200b\u2060-\u2064\u3164\ufeff\uffa0]")
_REFUSED_CATEGORIES = {"Cc", "Cs", "Zl", "Zp"}
_PATH = re.compile(
    r"""(?<![A-Za-z])[A-Za-z]:[\\/]          # C:\ or C:/
      | \\\\[\w.?]+\\                         # \\server\share
      | (?<![\w:/])//[\w-]+(?:\.[\w-]+)+/[\w.$-]  # //nas.local/share, //192.168.0.2/share
      | (?<![\w:/])//[\w-]+/[\w.-]+[$/]       # //nas/share$ and //nas/share/folder; //a/b may be tags
      | (?<![\w/:.<])/[\w.-]+/[\w.-]+         # /home/somebody
      | (?<!\w)~[\w.-]*[\\/]                  # ~/pictures
      | (?<![\w.])\.\.[\\/]                   # ../
      | %\w+%[\\/] | \$\{?\w+\}?[\\/]         # %APPDATA%\ and $HOME/
      | \bfile:/""",
    re.VERBOSE,
)
_SECRET = re.compile(
    r"""\bhf_[A-Za-z0-9]{20} | \bgh[pousr]_[A-Za-z0-9]{20} | \bgithub_pat_\w{20} | \bsk-[\w-]{20} | \bAKIA[0-9A-Z]{16}
      | \bxox[abprs]-[\w-]{10} | \beyJ[\w-]{10,500}\.eyJ[\w-]{10} | -----BEGIN\s[A-Z\s]{0,30}PRIVATE\sKEY""",
    re.VERBOSE,
)
_HUB_ID_OR_FILE = re.compile(r"[^\\/]+(/[^\\/]+)?")
_HEADING = """\
# A preset for Impasto: python -m trainer presets add THIS_FILE
"""


class PresetBaseConfig(Section):
    """Base that the recipe was made for."""

    family: Family
    """Architecture of the base; the recipe does not work with another one."""
    name: str = Field(default="", max_length=200, examples=["model.safetensors"])
    """File name or Hub id of the base, without folders."""
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$", examples=["64 lowercase hex digits (0-9, a-f)"])
    """SHA-256 of the base file, to check for the same base. For a diffusers folder: the SHA-256 of the output of
    `sha256sum text_encoder*/*.safetensors unet/*.safetensors` there."""


class ExampleConfig(PromptConfig):
    """A prompt that shows what the preset's LoRA does."""

    prompt: str = Field(min_length=1, max_length=2000)
    """Prompt of the image, including trigger words."""
    negative: str = Field(default="", max_length=2000)
    """Negative prompt: what the image should not show."""


class GpuConfig(Section):
    """GPU that the fit was made for."""

    gigabytes: float = Field(gt=0.0, le=1024.0)
    """Nominal GPU memory in GB, such as 8 or 12."""
    name: str = Field(default="", max_length=100)
    """Name of the GPU; empty: any GPU with this much memory."""
    bf16: bool | None = None
    """Whether the GPU supports bf16; NVIDIA GPUs do, starting with the RTX 3000 series."""


class ImageFileConfig(Section):
    """Small preview image of the result."""

    image: str
    """PNG, JPEG or WebP file in base64."""


class Preset(Section):
    """A shareable file with a recipe, a fit, or both."""

    schema_version: int = Field(alias="schema", ge=1, le=SCHEMA)
    """File format version."""
    name: str = Field(min_length=1, max_length=LONGEST_NAME, examples=["soft-gouache"])
    """Name of the preset and of its file."""
    author: str = Field(default="", max_length=100)
    """Author of the preset."""
    license: str = Field(default="", max_length=200)
    """License of the preset."""
    notes: str = Field(default="", max_length=4000)
    """Notes: what the preset is good for, and what to watch out for."""
    trigger_words: tuple[TriggerWord, ...] = Field(default=(), strict=False, max_length=20)
    """Trigger words of the LoRA."""
    base: PresetBaseConfig
    """Base that the recipe was made for."""
    recipe: RecipeConfig | None = None
    """What the LoRA learns and how; keys not set here keep the job's values."""
    fit: FitConfig | None = None
    """Fit for one GPU; other GPUs get a new plan."""
    gpu: GpuConfig | None = None
    """GPU that the fit was made for."""
    examples: tuple[ExampleConfig, ...] = Field(default=(), strict=False, max_length=8)
    """Example prompts that show the result."""
    preview: ImageFileConfig | None = None
    """Small preview image of the result."""

    def rules(self) -> Iterator[tuple[str, str]]:
        """Yield errors for an empty preset, machine-specific fit keys, and a GPU without a fit."""
        if not any(part is not None and part.model_fields_set for part in (self.recipe, self.fit)):
            yield "recipe", "is missing or empty, and so is fit: the preset is empty"
        for key in MACHINE_KEYS:
            if self.fit is not None and key in self.fit.model_fields_set:
                yield f"fit.{key}", "belongs to one machine and cannot be in a preset; remove it"
        if self.gpu is not None and self.fit is None:
            yield "gpu", "describes the GPU of a fit, but there is no fit"


def text_faults(data: Mapping[str, Any]) -> list[str]:
    """Return "key: reason" for each string in a preset's data that is not allowed."""
    faults = []
    for key, text in _texts(data):
        if key == _IMAGE:
            continue
        reason = text_fault(text, several_lines=key in _SEVERAL_LINES) or _name_fault(key, text)
        if reason:
            faults.append(f"{printable(key, 80)}: {reason}")
    return faults


def text_fault(text: str, *, several_lines: bool = False) -> str | None:
    """Return why a string is not allowed in presets, or None if it is; `several_lines` allows line breaks and tabs."""
    if len(text) > _LONGEST:
        return f"has {len(text):,} characters; at most {_LONGEST:,} are allowed"
    odd = next((letter for letter in _FLAG.sub("", text) if _steers(letter, several_lines)), None)
    if odd is not None:
        return f"contains the control character U+{ord(odd):04X}; remove it"
    if found := _PATH.search(text):
        return f"contains what looks like a path ({_around(text, found)}); presets are shared with other people"
    if found := _SECRET.search(text):
        return f"contains what looks like a key or access token ({found[0][:6]}...); never share one"
    return None


def _texts(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the value of every string in the data, without recursion."""
    waiting: list[tuple[str, Any]] = [("", data)]
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, str):
            yield key, value
        elif isinstance(value, dict | list):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            waiting.extend((f"{key}.{name}" if key else str(name), inner) for name, inner in reversed(list(items)))


def _steers(letter: str, several_lines: bool) -> bool:
    if several_lines and letter in "\n\t":
        return False
    if not several_lines and _UNSEEN.match(letter):
        return True
    return unicodedata.category(letter) in _REFUSED_CATEGORIES or _DECEIVING.match(letter) is not None


def _name_fault(key: str, text: str) -> str | None:
    if key == "name" and text and safe_name(text) != unicodedata.normalize("NFC", text):
        return f'cannot be a file name; use "{safe_name(text)}" instead'
    if key == "base.name" and text and not _HUB_ID_OR_FILE.fullmatch(text):
        return "must be a file name or a Hub id owner/name, without folders"
    return None


def _around(text: str, found: re.Match[str]) -> str:
    return printable(text[found.start() : found.start() + 24], 24)


def dump_preset(preset: Preset) -> str:
    """Return the preset as TOML that ``parse_preset`` reads back as an equal preset with the same keys set."""
    without_image = preset.replaced(preview=None)
    lines = [*set_key_lines(without_image, ""), *_image_lines(preset)]
    return _HEADING + "\n".join(lines) + "\n"


def _image_lines(preset: Preset) -> Iterator[str]:
    """Yield the preview image split into short lines; most editors choke on a line of 50,000 characters."""
    if preset.preview is not None:
        compact = "".join(preset.preview.image.split())
        yield from ("", "[preview]", "# Small preview image of the result, in base64.", 'image = """')
        yield from (compact[start : start + 100] for start in range(0, len(compact), 100))
        yield '"""'
