"""The presets at hand: those that come with Impasto, and in the per-user folder the user's own and those received.

Whatever is written over one keeps what stood there as a version of it, in the folder `replaced` beside it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainer.config.base import Family
from trainer.config.fit import FitConfig
from trainer.config.presets.exchange import load_preset
from trainer.config.presets.picture import decode_picture
from trainer.config.presets.preset import LONGEST_NAME, Preset, dump_preset
from trainer.config.recipe import RecipeConfig
from trainer.config.resolve import changes, differences, flat
from trainer.config.toml_file import toml_value
from trainer.errors import ImpastoError, JobError
from trainer.files.architecture import NAMES
from trainer.files.assets import preset_path
from trainer.protocol import files, places
from trainer.protocol.files import made_up_name, numbered, safe_name
from trainer.protocol.reading import read_bytes

Origin = Literal["yours", "received", "built-in"]
_VERSION = re.compile(r"-(\d{8}-\d{6})(-\d{1,3})?")
_STAMP = "%Y%m%d-%H%M%S"
_PICTURE = "preview.picture"


@dataclass(frozen=True, slots=True)
class PresetEntry:
    """A preset and where it lies."""

    preset: Preset
    path: Path
    origin: Origin


@dataclass(frozen=True, slots=True)
class PresetVersion:
    """What a preset's file held before it was changed."""

    path: Path
    until: datetime
    """When it was replaced, in local time."""


@dataclass(frozen=True, slots=True)
class PresetLibrary:
    """All presets at hand, the user's own first, then those received, and the files that are broken with the reason."""

    presets: tuple[PresetEntry, ...]
    broken: tuple[tuple[Path, ImpastoError], ...]


def presets_folder() -> Path:
    """Return where the user's own presets lie, one file each."""
    return places.home() / "presets"


def folder_of(origin: Origin) -> Path:
    """Return where presets that come from the user, or from others, lie."""
    return presets_folder() / "received" if origin == "received" else presets_folder()


def read_shelf() -> PresetLibrary:
    """Read all presets at hand; a broken file of the user's is named and does not hide the others."""
    found: list[PresetEntry] = []
    broken: list[tuple[Path, ImpastoError]] = []
    origins: tuple[Origin, ...] = ("yours", "received")
    for origin in origins:
        for path in sorted(folder_of(origin).glob("*.toml")):
            try:
                found.append(PresetEntry(load_preset(path), path, origin))
            except JobError as error:
                broken.append((path, error))
    return PresetLibrary((*found, *_built_in()), tuple(broken))


def find_preset(name: str, family: Family | None = None) -> PresetEntry:
    """Return the preset that `name` means for bases of `family` (None: whichever there is).

    `name` is a preset's name, with any spelling of capitals, or the path of a preset file that ends in .toml. The
    user's own come before those of the same name that ship with Impasto. Raises JobError when there is none (with
    names that are near), when it is for the other family, or when the family decides and is not known.
    """
    if name.lower().endswith(".toml"):
        preset = load_preset(Path(name))
        require_family(preset, family)
        return PresetEntry(preset, Path(name), "yours")
    shelf = read_shelf()
    named = [each for each in shelf.presets if same_name(each.preset.name, name)]
    fitting = [each for each in named if family in (None, each.preset.base.family)]
    if named and not fitting:
        require_family(named[0].preset, family)
    if not fitting:
        raise _unknown(name, shelf)
    families = {each.preset.base.family for each in fitting}
    if len(families) > 1:
        raise JobError(
            "preset.ambiguous",
            f'There is a preset "{name}" for SD 1.5 and one for SDXL, and the base does not tell which is meant.',
            "Say --family sd15 or --family sdxl; in a job, state it as base.family.",
        )
    return fitting[0]


def fit_for(shelf: PresetLibrary, family: Family, total_bytes: int) -> PresetEntry | None:
    """Return the built-in fit for a card of that memory: of those made for no larger card, the one for the largest."""
    sold = total_bytes / 1024**3 * 1.06  # a card reports a few per cent less than it is sold with
    fits = [
        (each.preset.card.gigabytes, each)
        for each in shelf.presets
        if each.origin == "built-in" and each.preset.card is not None and each.preset.base.family == family
    ]
    return max((fit for fit in fits if fit[0] <= sold), key=lambda fit: fit[0], default=(0, None))[1]


def taken_by(preset: Preset) -> PresetEntry | None:
    """Return the preset in the user's folders that has this one's name and family, if there is one."""
    return _namesake(preset, read_shelf())


def require_free(preset: Preset, but: Path | None = None) -> None:
    """Raise JobError where another preset than that in the file `but` has this one's name and family."""
    if is_built_in(preset):
        sentence = f'"{preset.name}" is the name of a preset that comes with Impasto.'
        raise JobError("preset.built_in", sentence, "Choose another name.")
    former = taken_by(preset)
    if former is not None and former.path != but:
        sentence = f'You have a preset "{former.preset.name}" for this family already.'
        raise JobError("preset.taken", sentence, "Choose another name.")


def is_built_in(preset: Preset) -> bool:
    """Tell whether a preset that ships with Impasto has this one's name and family."""
    return any(_same_place(each.preset, preset) for each in _built_in())


def keep_preset(preset: Preset, origin: Origin = "yours") -> tuple[Path, Path | None]:
    """Put a preset among the user's own or those received, in the place of one of its name and family.

    Returns its path, and that of the version which keeps what it replaces. Raises OSError when the folder cannot be
    written; then nothing is changed.
    """
    shelf = read_shelf()
    former = _namesake(preset, shelf)
    path = former.path if former else _free_place(preset, folder_of(origin), shelf)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path, rewrite_preset(path, preset)


def rewrite_preset(path: Path, preset: Preset) -> Path | None:
    """Write a preset into its file; return the version that keeps what stood there. Raises OSError."""
    version = _back_up(path) if path.exists() else None
    files.write_text(path, dump_preset(preset))
    return version


def versions_of(path: Path) -> list[PresetVersion]:
    """Return what a preset's file held before, the latest first."""
    found = []
    for kept in (path.parent / "replaced").glob("*.toml"):
        stamp = _VERSION.fullmatch(kept.stem.removeprefix(path.stem)) if kept.stem.startswith(path.stem) else None
        if stamp:
            found.append((stamp[1], len(kept.stem), kept.stem, kept))
    stamps = sorted(found, reverse=True)
    return [PresetVersion(kept, datetime.strptime(stamp, _STAMP).astimezone()) for stamp, _, _, kept in stamps]


def free_name(name: str, family: Family, shelf: PresetLibrary) -> str:
    """Return `name`, or with a number behind it where a preset at hand for that family has it."""
    taken = [each.preset.name for each in shelf.presets if each.preset.base.family == family]
    short = made_up_name(name)[: LONGEST_NAME - 4].rstrip(". ")
    numbered = (f"{short} {number}" for number in range(2, 1000))
    return next(free for free in (name, *numbered) if not any(same_name(free, other) for other in taken))


def same_name(one: str, other: str) -> bool:
    """Tell whether two names are one to people and to file systems that take no notice of capitals."""
    return safe_name(one).casefold() == safe_name(other).casefold()


def _back_up(path: Path) -> Path:
    """Copy a preset's file, broken or not, into the folder of backups; none there is ever overwritten."""
    folder = path.parent / "replaced"
    folder.mkdir(exist_ok=True)
    stem = f"{path.stem}-{datetime.now().astimezone():{_STAMP}}"
    free = (folder / f"{each}.toml" for each in numbered(stem))
    target = next(path for path in free if not path.exists())
    files.write_bytes(target, read_bytes(path, "text"))
    return target


def _namesake(preset: Preset, shelf: PresetLibrary) -> PresetEntry | None:
    mine = (each for each in shelf.presets if each.origin != "built-in")
    return next((each for each in mine if _same_place(each.preset, preset)), None)


def _free_place(preset: Preset, folder: Path, shelf: PresetLibrary) -> Path:
    """Return a file that holds no sound preset: one that was renamed stays in the file of its first name."""
    stem = safe_name(f"{preset.name}.{preset.base.family}")
    taken = {each.path for each in shelf.presets}
    places = (folder / f"{each}.toml" for each in numbered(stem))
    return next(place for place in places if place not in taken)


def _built_in() -> Iterator[PresetEntry]:
    for folder in ("recipes", "fits"):
        presets = [(load_preset(path), path) for path in sorted(preset_path(folder).glob("*.toml"))]
        for preset, path in sorted(presets, key=lambda each: _family_and_card(each[0])):
            yield PresetEntry(preset, path, "built-in")


def _family_and_card(preset: Preset) -> tuple[str, float]:
    """So that a card of 6 GB comes before one of 10; recipes are for no card."""
    return preset.base.family, preset.card.gigabytes if preset.card else 0


def _same_place(one: Preset, other: Preset) -> bool:
    return one.base.family == other.base.family and same_name(one.name, other.name)


def require_family(preset: Preset, family: Family | None) -> None:
    """Raise JobError when a preset is not for bases of `family`; None is any."""
    if family not in (None, preset.base.family):
        raise JobError(
            "preset.family",
            f'The preset "{preset.name}" is for {NAMES[preset.base.family]}, but the base is {NAMES[family]}.',
            f"Choose a preset for {NAMES[family]}; `python -m trainer presets list` shows them.",
        )


def _unknown(name: str, shelf: PresetLibrary) -> JobError:
    names: Sequence[str] = list(dict.fromkeys(each.preset.name for each in shelf.presets))
    near = difflib.get_close_matches(name, names, n=3)
    broken = _broken_of(name, shelf.broken)
    if broken:
        path, error = broken
        return JobError("preset.broken", f"The preset {path} cannot be used: {error.sentence}", error.remedy)
    remedy = f"Did you mean {' or '.join(near)}? " if near else ""
    return JobError(
        "preset.unknown",
        f'There is no preset called "{name[:80]}".',
        remedy + "`python -m trainer presets list` shows those at hand; a file is named with its ending .toml.",
    )


def _broken_of(name: str, broken: Iterable[tuple[Path, ImpastoError]]) -> tuple[Path, ImpastoError] | None:
    return next((each for each in broken if same_name(each[0].stem.rpartition(".")[0], name)), None)


def recipe_overrides(recipe: RecipeConfig) -> list[str]:
    """What the recipe states, as ``key=value`` texts for ``load_job``; put the user's own after them.

    The optimizer is one value, so that no argument of the job's own optimizer is left over.
    """
    stated = recipe.model_dump(mode="json", by_alias=True, exclude_unset=True)
    optimizer = stated.pop("optimizer", None)
    texts = [f"{key}={toml_value(value)}" for key, value in flat(stated, "recipe") if value is not None]
    if optimizer is not None:
        arguments = (f"{key} = {toml_value(value)}" for key, value in optimizer.items() if value is not None)
        texts.append(f"recipe.optimizer={{{', '.join(arguments)}}}")
    return texts


def compared(former: Preset, new: Preset) -> list[str]:
    """How ``new`` differs from ``former``, one sentence a key; empty when they say the same."""
    return differences(_flat_preset(former), _flat_preset(new))


def changed_keys(former: Preset | None, new: Preset) -> list[tuple[str, str, str]]:
    """Return each key in which ``new`` differs from ``former`` with both values in words.

    Without a ``former`` one, its recipe is set against a job that states nothing.
    """
    if former is not None:
        return changes(_flat_preset(former), _flat_preset(new))
    if new.recipe is None:
        return []
    return changes(*_beside_defaults(new.recipe, ""))


def compared_with_defaults(recipe: RecipeConfig) -> list[str]:
    """What the recipe states otherwise than a job that states nothing: "recipe.rank = 32 instead of 16"."""
    defaults, stated = _beside_defaults(recipe, "recipe")
    return [
        f"{key} = {toml_value(value)}" + (f" instead of {toml_value(defaults[key])}" if defaults[key] else "")
        for key, value in stated.items()
        if value != defaults[key]
    ]


def stated_fit(fit: FitConfig) -> list[str]:
    """What a fit states: "fit.micro_batch = 2"."""
    stated = fit.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)
    return [f"{key} = {toml_value(value)}" for key, value in flat(stated, "fit")]


def _beside_defaults(recipe: RecipeConfig, path: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """What a job that states nothing has for the keys that a recipe states, and what that states."""
    stated = dict(flat(recipe.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True), path))
    defaults = dict(flat(RecipeConfig().model_dump(mode="json", by_alias=True), path))
    return {key: defaults.get(key) for key in stated}, stated


def _flat_preset(preset: Preset) -> Mapping[str, Any]:
    """What the preset states; an empty text, such as that of no negative prompt, states nothing."""
    stated = flat(preset.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True), "")
    values = {key: value for key, value in stated if value != ""}
    if preset.preview is not None:
        values[_PICTURE] = f"a picture of {len(decode_picture(preset.preview.picture)):,} bytes"
    return values


if TYPE_CHECKING:
    from trainer.config.base import Family
    from trainer.config.fit import FitConfig
    from trainer.config.presets.preset import Preset
    from trainer.config.recipe import RecipeConfig


def preset_with_recipe(name: str, family: Family | None) -> Preset:
    """Return a preset for bases of `family`, by its name or file; raises JobError when it has no recipe."""
    preset = find_preset(name, family).preset
    if preset.recipe is None:
        sentence = f'The preset "{preset.name}" holds a fit and no recipe.'
        raise JobError("preset.no_recipe", sentence, "Choose one with a recipe; `presets list` shows them.")
    return preset
