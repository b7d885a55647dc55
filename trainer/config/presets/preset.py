"""What a preset is: a recipe, a fit, or both, with who made it, for which base, and how it may look."""

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
from trainer.config.write import stated_lines
from trainer.protocol.files import safe_name
from trainer.protocol.text import printable

SCHEMA = 1
LONGEST_NAME = 80
RECIPE_KEY = "impasto_recipe"
"""The key in a LoRA's metadata under which Impasto's own files hold their whole recipe as JSON."""

# What of a fit belongs to one machine and would be wrong, or reveal something, on another.
MACHINE_KEYS = ("device", "threads", "cache_gigabytes", "int8_products")

TriggerWord = Annotated[str, Field(min_length=1, max_length=100)]
_LONGEST = 4000  # characters of any text; shorter limits stand beside their fields
_PICTURE = "preview.picture"
_SEVERAL_LINES = {"notes"}
# Marks that reorder text make it read as something else than it is (CVE-2021-42574), and tags spell letters that
# nobody sees; Zl and Zp are line breaks.
_DECEIVING = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\U000e0000-\U000e007f]")
# The flags of England, Scotland and Wales are such letters behind a black flag (UTS #51): the code of a region and of
# a part of it, with an end. As short as that they hide nothing worth it.
_FLAG = re.compile("\U0001f3f4[\U000e0030-\U000e0039\U000e0061-\U000e007a]{3,7}\U000e007f")
# Of no width: two names, trigger words or prompts look alike by them; what is pasted into notes may hold some.
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
    """The base that the recipe was made for."""

    family: Family
    """Which architecture it is for; a recipe for one suits no other."""
    name: str = Field(default="", max_length=200, examples=["model.safetensors"])
    """The base's file name or Hub id, without folders."""
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$", examples=["64 digits of 0-9 and a-f"])
    """SHA-256 of the base's file, by which others can tell whether theirs is the same; of a diffusers folder that of
    what `sha256sum text_encoder*/*.safetensors unet/*.safetensors` prints in it."""


class ExampleConfig(PromptConfig):
    """A prompt that shows what the preset's LoRA does."""

    prompt: str = Field(min_length=1, max_length=2000)
    """What the picture shows, trigger words included."""
    negative: str = Field(default="", max_length=2000)
    """What the picture should not show (negative prompt)."""


class CardConfig(Section):
    """The graphics card that the fit was made for."""

    gigabytes: float = Field(gt=0.0, le=1024.0)
    """Its memory as it is sold, such as 8 or 12."""
    name: str = Field(default="", max_length=100)
    """Its name; empty: any card of that size."""
    bf16: bool | None = None
    """Whether it computes in bf16; NVIDIA's cards do since the RTX 3000 series."""


class PictureFileConfig(Section):
    """A small picture that shows the result."""

    picture: str
    """A PNG, JPEG or WebP file in base64."""


class Preset(Section):
    """A file that carries a recipe, a fit, or both from artist to artist."""

    schema_version: int = Field(alias="schema", ge=1, le=SCHEMA)
    """The version of this file's form."""
    name: str = Field(min_length=1, max_length=LONGEST_NAME, examples=["soft-gouache"])
    """What the preset is called; it also becomes its file's name."""
    author: str = Field(default="", max_length=100)
    """Who made it."""
    licence: str = Field(default="", max_length=200)
    """Under which licence it may be used."""
    notes: str = Field(default="", max_length=4000)
    """What it is good for, and what to mind."""
    trigger_words: tuple[TriggerWord, ...] = Field(default=(), strict=False, max_length=20)
    """The words that called up what was learned."""
    base: PresetBaseConfig
    """The base that the recipe was made for."""
    recipe: RecipeConfig | None = None
    """What is learned and how; keys that are absent stay as the job has them."""
    fit: FitConfig | None = None
    """How it was made to fit one card; another card is planned for anew."""
    card: CardConfig | None = None
    """The graphics card that the fit was made for."""
    examples: tuple[ExampleConfig, ...] = Field(default=(), strict=False, max_length=8)
    """Prompts that show what it does."""
    preview: PictureFileConfig | None = None
    """A small picture that shows the result."""

    def rules(self) -> Iterator[tuple[str, str]]:
        """Something to carry, nothing that belongs to one machine, and a card only beside a fit."""
        if not any(part is not None and part.model_fields_set for part in (self.recipe, self.fit)):
            yield "recipe", "is missing or empty, and so is fit: the preset carries nothing"
        for key in MACHINE_KEYS:
            if self.fit is not None and key in self.fit.model_fields_set:
                yield f"fit.{key}", "belongs to one machine and cannot travel in a preset; leave it out"
        if self.card is not None and self.fit is None:
            yield "card", "tells what a fit was made for, but there is no fit"


def text_faults(data: Mapping[str, Any]) -> list[str]:
    """Name each text in a preset's data that may not stand there: "key: reason"."""
    faults = []
    for key, text in _texts(data):
        if key == _PICTURE:
            continue
        reason = text_fault(text, several_lines=key in _SEVERAL_LINES) or _name_fault(key, text)
        if reason:
            faults.append(f"{printable(key, 80)}: {reason}")
    return faults


def text_fault(text: str, *, several_lines: bool = False) -> str | None:
    """The reason why no preset may hold this text, if there is one; `several_lines` allows line breaks and tabs."""
    if len(text) > _LONGEST:
        return f"is a text of {len(text):,} characters; at most {_LONGEST:,} are read"
    odd = next((letter for letter in _FLAG.sub("", text) if _steers(letter, several_lines)), None)
    if odd is not None:
        return f"holds the control character U+{ord(odd):04X}, which no text needs"
    if found := _PATH.search(text):
        return f"holds what looks like a path ({_around(text, found)}); presets go to other people and machines"
    if found := _SECRET.search(text):
        return f"holds what looks like a key or an access token ({found[0][:6]}...); never share one"
    return None


def _texts(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Every text in the data with its dotted key; what is deeper than a preset goes was refused before."""
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
        return f'cannot be the name of a file; "{safe_name(text)}" could'
    if key == "base.name" and text and not _HUB_ID_OR_FILE.fullmatch(text):
        return "must be a file name or a Hub id owner/name, without folders"
    return None


def _around(text: str, found: re.Match[str]) -> str:
    return printable(text[found.start() : found.start() + 24], 24)


def dump_preset(preset: Preset) -> str:
    """The preset as TOML that ``parse_preset`` reads as an equal one, with the same keys stated."""
    without_picture = preset.changed(preview=None)
    lines = [*stated_lines(without_picture, ""), *_picture_lines(preset)]
    return _HEADING + "\n".join(lines) + "\n"


def _picture_lines(preset: Preset) -> Iterator[str]:
    """The picture over many lines: one of 50,000 characters would bring most editors to their knees."""
    if preset.preview is not None:
        compact = "".join(preset.preview.picture.split())
        yield from ("", "[preview]", "# A small picture that shows the result, in base64.", 'picture = """')
        yield from (compact[start : start + 100] for start in range(0, len(compact), 100))
        yield '"""'
