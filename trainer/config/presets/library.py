"""The preset library: built-in presets and, in the per-user folder, the user's own and received presets.

When a preset is overwritten, its previous version is kept in the subfolder `replaced`.
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
from trainer.config.presets.exchange import load_preset, load_preset_or_image, read_pasted
from trainer.config.presets.preset import LONGEST_NAME, Preset, dump_preset
from trainer.config.presets.preview_image import decode_image
from trainer.config.recipe import RecipeConfig
from trainer.config.resolve import changes, differences, flatten
from trainer.config.toml_file import toml_value
from trainer.errors import ImpastoError, JobError
from trainer.files.architecture import NAMES
from trainer.files.assets import preset_path
from trainer.protocol import files, places
from trainer.protocol.files import numbered, safe_name, valid_job_name
from trainer.protocol.reading import read_bytes

Origin = Literal["yours", "received", "built-in"]
_VERSION = re.compile(r"-(\d{8}-\d{6})(-\d{1,3})?")
_STAMP = "%Y%m%d-%H%M%S"
_IMAGE = "preview.image"


@dataclass(frozen=True, slots=True)
class PresetEntry:
    """A preset, its file and its origin."""

    preset: Preset
    path: Path
    origin: Origin


@dataclass(frozen=True, slots=True)
class PresetVersion:
    """A previous version of a preset file."""

    path: Path
    until: datetime
    """Local time at which this version was replaced."""


@dataclass(frozen=True, slots=True)
class PresetLibrary:
    """All presets (the user's own, then received, then built-in), and damaged files with their errors."""

    presets: tuple[PresetEntry, ...]
    broken: tuple[tuple[Path, ImpastoError], ...]


def presets_folder() -> Path:
    """Return the folder of the user's own presets, one file each."""
    return places.home() / "presets"


def folder_of(origin: Origin) -> Path:
    """Return the folder for presets of this origin: the user's own or received ones."""
    return presets_folder() / "received" if origin == "received" else presets_folder()


def read_library() -> PresetLibrary:
    """Read all presets; damaged files in the user's folders are listed and do not hide the others."""
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
    """Return the preset called `name` for bases of `family` (None: any).

    `name` is a preset's name, ignoring case, or the path of a .toml preset file. The user's own presets take
    precedence over built-in ones with the same name. Raises JobError if there is no such preset (suggesting similar
    names), if it is for the other family, or if both families have one and `family` is None.
    """
    if name.lower().endswith(".toml"):
        preset = load_preset(Path(name))
        require_family(preset, family)
        return PresetEntry(preset, Path(name), "yours")
    library = read_library()
    named = [each for each in library.presets if same_name(each.preset.name, name)]
    fitting = [each for each in named if family in (None, each.preset.base.family)]
    if named and not fitting:
        require_family(named[0].preset, family)
    if not fitting:
        raise _unknown(name, library)
    families = {each.preset.base.family for each in fitting}
    if len(families) > 1:
        raise JobError(
            "preset.ambiguous",
            f'Two presets are called "{name}": one for SD 1.5 and one for SDXL.',
            "Add --family sd15 or --family sdxl, or set base.family in the job.",
        )
    return fitting[0]


def fit_for(library: PresetLibrary, family: Family, total_bytes: int) -> PresetEntry | None:
    """Return the built-in fit preset for the largest GPU with at most this much memory, or None."""
    sold = total_bytes / 1024**3 * 1.06  # a GPU reports a few percent less than its nominal memory
    fits = [
        (each.preset.gpu.gigabytes, each)
        for each in library.presets
        if each.origin == "built-in" and each.preset.gpu is not None and each.preset.base.family == family
    ]
    return max((fit for fit in fits if fit[0] <= sold), key=lambda fit: fit[0], default=(0, None))[1]


def preset_with_same_name(preset: Preset) -> PresetEntry | None:
    """Return the preset in the user's folders with the same name and family, or None."""
    return _namesake(preset, read_library())


def require_free(preset: Preset, but: Path | None = None) -> None:
    """Raise JobError if another preset, except the one in file `but`, has the same name and family."""
    if is_built_in(preset):
        sentence = f'"{preset.name}" is the name of a preset that comes with Impasto.'
        raise JobError("preset.built_in", sentence, "Choose another name.")
    former = preset_with_same_name(preset)
    if former is not None and former.path != but:
        sentence = f'You already have a preset "{former.preset.name}" for this base family.'
        raise JobError("preset.taken", sentence, "Choose another name.")


def is_built_in(preset: Preset) -> bool:
    """Return whether a built-in preset has the same name and family."""
    return any(_same_place(each.preset, preset) for each in _built_in())


def save_preset(preset: Preset, origin: Origin = "yours") -> tuple[Path, Path | None]:
    """Save a preset as the user's own or as received, replacing one with the same name and family.

    Returns its path, and the path of the replaced version or None. Raises OSError, and changes nothing, if the folder
    is not writable.
    """
    library = read_library()
    former = _namesake(preset, library)
    path = former.path if former else _free_place(preset, folder_of(origin), library)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path, rewrite_preset(path, preset)


def rewrite_preset(path: Path, preset: Preset) -> Path | None:
    """Write a preset to its file; return the path of the previous version, or None. Raises OSError."""
    version = _back_up(path) if path.exists() else None
    files.write_text(path, dump_preset(preset))
    return version


def versions_of(path: Path) -> list[PresetVersion]:
    """Return the previous versions of a preset file, latest first."""
    found = []
    for kept in (path.parent / "replaced").glob("*.toml"):
        stamp = _VERSION.fullmatch(kept.stem.removeprefix(path.stem)) if kept.stem.startswith(path.stem) else None
        if stamp:
            found.append((stamp[1], len(kept.stem), kept.stem, kept))
    stamps = sorted(found, reverse=True)
    return [PresetVersion(kept, datetime.strptime(stamp, _STAMP).astimezone()) for stamp, _, _, kept in stamps]


def free_name(name: str, family: Family, library: PresetLibrary) -> str:
    """Return `name`, with a number appended if a preset of that family already has it."""
    taken = [each.preset.name for each in library.presets if each.preset.base.family == family]
    short = valid_job_name(name)[: LONGEST_NAME - 4].rstrip(". ")
    numbered = (f"{short} {number}" for number in range(2, 1000))
    return next(free for free in (name, *numbered) if not any(same_name(free, other) for other in taken))


def same_name(one: str, other: str) -> bool:
    """Return whether two names give the same file name on a case-insensitive file system."""
    return safe_name(one).casefold() == safe_name(other).casefold()


def _back_up(path: Path) -> Path:
    """Copy a preset file, valid or not, to `replaced` without overwriting anything; return the copy's path."""
    folder = path.parent / "replaced"
    folder.mkdir(exist_ok=True)
    stem = f"{path.stem}-{datetime.now().astimezone():{_STAMP}}"
    free = (folder / f"{each}.toml" for each in numbered(stem))
    target = next(path for path in free if not path.exists())
    files.write_bytes(target, read_bytes(path, "text"))
    return target


def _namesake(preset: Preset, library: PresetLibrary) -> PresetEntry | None:
    mine = (each for each in library.presets if each.origin != "built-in")
    return next((each for each in mine if _same_place(each.preset, preset)), None)


def _free_place(preset: Preset, folder: Path, library: PresetLibrary) -> Path:
    """Return an unused path for a preset; numbered if another preset, since renamed, still uses that file name."""
    stem = safe_name(f"{preset.name}.{preset.base.family}")
    taken = {each.path for each in library.presets}
    places = (folder / f"{each}.toml" for each in numbered(stem))
    return next(place for place in places if place not in taken)


def _built_in() -> Iterator[PresetEntry]:
    for folder in ("recipes", "fits"):
        presets = [(load_preset(path), path) for path in sorted(preset_path(folder).glob("*.toml"))]
        for preset, path in sorted(presets, key=lambda each: _family_and_memory(each[0])):
            yield PresetEntry(preset, path, "built-in")


def _family_and_memory(preset: Preset) -> tuple[str, float]:
    """Return a sort key: the family, then the GPU memory of a fit, or 0 for a recipe."""
    return preset.base.family, preset.gpu.gigabytes if preset.gpu else 0


def _same_place(one: Preset, other: Preset) -> bool:
    return one.base.family == other.base.family and same_name(one.name, other.name)


def require_family(preset: Preset, family: Family | None) -> None:
    """Raise JobError if a preset is not for bases of `family` (None: any)."""
    if family not in (None, preset.base.family):
        raise JobError(
            "preset.family",
            f'The preset "{preset.name}" is for {NAMES[preset.base.family]}, but the base is {NAMES[family]}.',
            f"Choose a preset for {NAMES[family]}; `python -m trainer presets list` shows them.",
        )


def _unknown(name: str, library: PresetLibrary) -> JobError:
    names: Sequence[str] = list(dict.fromkeys(each.preset.name for each in library.presets))
    near = difflib.get_close_matches(name, names, n=3)
    broken = _broken_of(name, library.broken)
    if broken:
        path, error = broken
        return JobError("preset.broken", f"Could not use the preset {path}: {error.sentence}", error.remedy)
    remedy = f"Did you mean {' or '.join(near)}? " if near else ""
    return JobError(
        "preset.unknown",
        f'There is no preset called "{name[:80]}".',
        remedy + "`python -m trainer presets list` shows all presets; to use a file, add its extension .toml.",
    )


def _broken_of(name: str, broken: Iterable[tuple[Path, ImpastoError]]) -> tuple[Path, ImpastoError] | None:
    return next((each for each in broken if same_name(each[0].stem.rpartition(".")[0], name)), None)


def recipe_overrides(recipe: RecipeConfig) -> list[str]:
    """Return the keys set in a recipe as ``key=value`` overrides for ``load_job``.

    The user's own overrides must come after them. The optimizer and the blocks are one override each, which removes the
    arguments of the job's own optimizer and the job's own blocks.
    """
    stated = recipe.model_dump(mode="json", by_alias=True, exclude_unset=True)
    whole = {key: stated.pop(key) for key in ("optimizer", "blocks") if stated.get(key) is not None}
    texts = [f"{key}={toml_value(value)}" for key, value in flatten(stated, "recipe") if value is not None]
    return [*texts, *(f"recipe.{key}={toml_value(_without_none(value))}" for key, value in whole.items())]


def _without_none(value: Any) -> Any:
    """Return a table or a list of tables without the keys whose value is None, which TOML cannot express."""
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return {key: item for key, item in value.items() if item is not None}


def compared(former: Preset, new: Preset) -> list[str]:
    """Return the differences between ``former`` and ``new``, one line per key; empty if they are equal."""
    return differences(_flat_preset(former), _flat_preset(new))


def changed_keys(former: Preset | None, new: Preset) -> list[tuple[str, str, str]]:
    """Return each key in which ``new`` differs from ``former``, with both values as text.

    If ``former`` is None, the new recipe is compared with the defaults.
    """
    if former is not None:
        return changes(_flat_preset(former), _flat_preset(new))
    if new.recipe is None:
        return []
    return changes(*_with_defaults(new.recipe, ""))


def compared_with_defaults(recipe: RecipeConfig) -> list[str]:
    """Return a recipe's differences from the defaults, such as "recipe.rank = 32 instead of 16"."""
    defaults, stated = _with_defaults(recipe, "recipe")
    return [
        f"{key} = {toml_value(value)}" + (f" instead of {toml_value(defaults[key])}" if defaults[key] else "")
        for key, value in stated.items()
        if value != defaults[key]
    ]


def stated_fit(fit: FitConfig) -> list[str]:
    """Return the keys set in a fit with their values, as lines such as "fit.micro_batch = 2"."""
    stated = fit.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)
    return [f"{key} = {toml_value(value)}" for key, value in flatten(stated, "fit")]


def _with_defaults(recipe: RecipeConfig, path: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return two mappings for the keys set in a recipe: their default values and their actual values."""
    stated = dict(flatten(recipe.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True), path))
    defaults = dict(flatten(RecipeConfig().model_dump(mode="json", by_alias=True), path))
    return {key: defaults.get(key) for key in stated}, stated


def _flat_preset(preset: Preset) -> Mapping[str, Any]:
    """Return the values set in a preset by dotted key, except empty strings, such as an empty negative prompt."""
    stated = flatten(preset.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True), "")
    values = {key: value for key, value in stated if value != ""}
    if preset.preview is not None:
        values[_IMAGE] = f"an image of {len(decode_image(preset.preview.image)):,} bytes"
    return values


if TYPE_CHECKING:
    from trainer.config.base import Family
    from trainer.config.fit import FitConfig
    from trainer.config.presets.preset import Preset
    from trainer.config.recipe import RecipeConfig


def preset_with_recipe(name: str, family: Family | None) -> Preset:
    """Return the preset with this name or path for bases of `family`; raises JobError if it has no recipe."""
    preset = find_preset(name, family).preset
    if preset.recipe is None:
        sentence = f'The preset "{preset.name}" has a fit but no recipe.'
        raise JobError("preset.no_recipe", sentence, "Choose one with a recipe; `presets list` shows them.")
    return preset


@dataclass(frozen=True, slots=True)
class Received:
    """A received preset, and the changes that adding it would make."""

    preset: Preset
    file: Path
    """Temporary copy of the preset that the planner reads while the preset is being previewed."""
    existing: PresetEntry | None
    """The preset in the library with the same name and family, if any."""
    built_in: bool
    """Whether a built-in preset has the same name, in which case this preset must be renamed."""
    free_name: str
    """The preset's name, with a number appended if the name is taken."""
    changes: tuple[tuple[str, str, str], ...]
    """Key, old value and new value of each difference from `existing`, or from the defaults if that is None."""

    @property
    def is_unchanged(self) -> bool:
        """Return whether the library already has an identical preset."""
        return self.existing is not None and not self.changes


def receive_file(path: Path) -> Received:
    """Read a preset file or an image that contains a preset; raise JobError for anything else."""
    return _received(load_preset_or_image(path))


def receive_text(text: str, source: str) -> Received:
    """Read a pasted preset; raise JobError for anything else. `source` names the text in errors."""
    return _received(read_pasted(text, source))


def _received(preset: Preset) -> Received:
    file = presets_folder() / "arriving" / "preset.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(file, dump_preset(preset.replaced(preview=None)), durable=False)
    existing = preset_with_same_name(preset)
    return Received(
        preset,
        file,
        existing,
        is_built_in(preset),
        free_name(preset.name, preset.base.family, read_library()),
        tuple(changed_keys(existing.preset if existing else None, preset)),
    )
