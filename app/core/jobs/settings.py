"""Settings of a job for the form, all derived from the schema."""

from __future__ import annotations

import copy
import math
import re
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError

from app.core.jobs.job_file import Values, drop, value_at
from trainer.config.base import Family, Prediction
from trainer.config.checks import doubtful, prodigy_at_a_small_rate, without_effect
from trainer.config.field_names import FIELD_NAMES, has_name
from trainer.config.job import SCHEMA, Job
from trainer.config.paths import base_path_by_form, make_absolute
from trainer.config.problems import problems
from trainer.config.schema import KeyDescription, fields
from trainer.protocol.reading import UnusableFileError, parse_toml

_INTEGER = re.compile(r"[+-]?\d{1,400}")
_FILLERS: Values = {
    "schema": SCHEMA,
    "name": "job",
    "base": {"model": "a/base"},
    "dataset": {"folders": [{"path": "."}]},
}
_FOLDERS = "dataset.folders"
ITEM_NAMES = {_FOLDERS: "path", "recipe.blocks": "match", "report.previews.prompts": "prompt"}
"""The key that names the items of each list of tables."""
_LONGEST_ITEM = 40
_MAX_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of the schema."""

    key: str
    """Dotted key; ``*`` is an index in a list."""
    kind: str
    """Optimizer that this setting is an argument of, since defaults differ by optimizer; "" for other settings."""
    values: str
    """Description of the allowed values, worded to follow "must be"."""
    default: Any
    """Default value; None if absent or required."""
    doc: str
    parts: tuple[Any, ...]
    """Allowed types and values: bool, int, float, str, dict, a literal, or a tuple (list, *parts of its items)."""
    label: str = ""
    """Label set by the schema; empty if derived from the key."""

    @property
    def table(self) -> str:
        """Return the dotted name of the table that contains the key; "" for a top-level key."""
        return self.key.rpartition(".")[0]

    @property
    def title(self) -> str:
        """Return the setting's label, such as "Learning rate"."""
        return self.label or title_of(self.key)

    @property
    def choices(self) -> tuple[Any, ...]:
        """Return all allowed values; empty if any number, text or list is allowed."""
        if any(part in (int, float, str, dict) or isinstance(part, tuple) for part in self.parts):
            return ()
        return tuple(value for part in self.parts for value in ((True, False) if part is bool else (part,)))

    @property
    def described_default(self) -> str:
        """Return the default as described in its help, such as "half the resolution"; "" if the help describes none."""
        found = re.search(r"default: ([^;]+?)(?:;|\.(?:\s|$))", self.doc)
        return found[1] if found else ""

    @property
    def is_off_by_default(self) -> bool:
        """Return whether the setting is off unless it has a value, as described in its help."""
        return self.default is None and self.described_default == "off"

    @property
    def can_be_empty(self) -> bool:
        """Return whether an empty text of a folder's caption settings differs from no value, which is the recipe's."""
        return str in self.parts and self.default is None and self.described_default == "as in the recipe"

    @property
    def words(self) -> tuple[str, ...]:
        """Return the words that are allowed as values, possibly along with numbers or lists."""
        return tuple(part for part in self.parts if isinstance(part, str))

    @property
    def other_names(self) -> tuple[str, ...]:
        """Return what other trainers call the setting."""
        return FIELD_NAMES.get(self.key, ())

    def typed(self, text: str) -> Any:
        """Return typed text as a value; text that fits no type stays text, so that `judge` reports it."""
        text = text.strip()
        if dict in self.parts:
            return _table(text)
        inner = next((part[1:] for part in self.parts if isinstance(part, tuple)), None)
        if inner and text not in self.words:
            return [_typed(item.strip(), inner) for item in text.split(",") if item.strip()]
        return _typed(text, self.parts)


def is_found_by(wanted: Sequence[str], listed: Iterable[Setting]) -> bool:
    """Return whether titles, keys, help and optimizer names of settings together contain all of these lowercase words.

    Also if the words are part of what another trainer calls one of them, such as "network dim".
    """
    found = list(listed)
    text = " ".join(f"{each.title} {each.key} {each.doc} {each.kind}" for each in found).lower()
    return all(word in text for word in wanted) or any(has_name(each.key, " ".join(wanted)) for each in found)


def title_of(key: str) -> str:
    """Return the label of a dotted key, such as "UNet learning rate" for "recipe.learning_rate"."""
    if label := _label(key):
        return label
    name = key.rpartition(".")[2].replace("_", " ")
    return name[:1].upper() + name[1:]


def full_title(key: str, values: Values | None = None) -> str:
    """Return a key's label in the schema; if there is none, its name after its tables' labels.

    The item of a list of tables that the key is in comes first, named as in ``values`` (None: by its number). For
    example, "Text encoder › Rank", "unet.mid_block.* › Rank" and "Blocks 2 › Rank".
    """
    parts = key.split(".")
    if parts[-1].isdigit() and ".".join(parts[:-1]) not in tables():
        parts.pop()  # one of several plain values, such as timesteps
    place = next((number for number, part in enumerate(parts) if part.isdigit()), None)
    items = [] if place is None else [_item_title(".".join(parts[:place]), int(parts[place]), values or {})]
    first = 0 if place is None else place + 1
    paths = [".".join(parts[: end + 1]) for end in range(first, len(parts))]
    label = _label(".".join(parts)) if paths else ""
    return " › ".join([*items, *([label] if label else [title_of(path) for path in paths if path != "recipe"])])


def _item_title(table: str, place: int, values: Values) -> str:
    """Return the name of an item of a list of tables, with its number if the name is absent or not the only one."""
    listed = value_at(values, table)
    names = [_item_name(table, item) for item in listed] if isinstance(listed, list) else []
    name = names[place] if place < len(names) else ""
    if not name:
        return f"{title_of(table)} {place + 1}"
    return f"{name} ({place + 1})" if names.count(name) > 1 else name


def _item_name(table: str, item: Any) -> str:
    found = item.get(ITEM_NAMES.get(table)) if isinstance(item, dict) else None
    name = found.strip() if isinstance(found, str) else ""
    if table == _FOLDERS:
        name = Path(name).name or name
    return f"{name[:_LONGEST_ITEM].rstrip()}…" if len(name) > _LONGEST_ITEM else name


@lru_cache(maxsize=1)
def settings() -> tuple[Setting, ...]:
    """Return every user setting, in file order."""
    return tuple(_setting(found) for found in fields(Job) if not _is_table(found) and not _is_internal(found.key))


def setting(key: str, kind: str = "") -> Setting:
    """Return the setting at a dotted key, whose list indices may be numbers or ``*``; raises KeyError if unknown."""
    return _by_key()[re.sub(r"\.\d+(?=\.|$)", ".*", key), kind]


def arguments(kind: Any) -> set[str]:
    """Return the names of an optimizer's arguments, including ``name``; an empty set for an unknown optimizer."""
    own = {each.key.rpartition(".")[2] for each in settings() if each.kind == kind and each.kind}
    return {*own, "name"} if own else set()


@lru_cache(maxsize=1)
def tables() -> dict[str, str]:
    """Return the purpose of each table of a job, by the table's dotted name."""
    return {found.key: found.doc for found in fields(Job) if _is_table(found)}


def _label(key: str) -> str:
    """Return the label that the schema sets for a key or, if none, for the key in `recipe`; "" if it sets neither."""
    place = re.sub(r"\.\d+(?=\.|$)", ".*", key)
    return _labels().get(place) or _labels().get(f"recipe.{place}", "")


@lru_cache(maxsize=1)
def _labels() -> dict[str, str]:
    return {re.sub(r"\[.*?\]", "", found.key): found.title for found in fields(Job) if found.title}


@lru_cache(maxsize=1)
def _by_key() -> dict[tuple[str, str], Setting]:
    return {(each.key, each.kind): each for each in settings()}


def _setting(found: KeyDescription) -> Setting:
    kind = re.search(r"\[(.*?)\]", found.key)
    key = re.sub(r"\[.*?\]", "", found.key)
    default = list(found.default) if isinstance(found.default, tuple) else found.default
    parts = found.names or tuple(_parts(found.annotation))
    return Setting(key, kind[1] if kind else "", found.values, default, found.doc, parts, found.title)


def _is_table(found: KeyDescription) -> bool:
    return found.values in ("a table", "a list of tables") or found.values.startswith("a table or")


def _is_internal(key: str) -> bool:
    """Return whether a key is set by the app, not by users: format, source preset, planned or measured values."""
    return key in ("schema", "preset") or key.startswith(("fallbacks", "fit.int8_products"))


def _parts(annotation: Any) -> Iterator[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _parts(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from _parts(part)
    elif origin is Literal:
        yield from get_args(annotation)
    elif origin is dict:
        yield dict
    elif origin is tuple:
        yield (list, *_parts(get_args(annotation)[0]))
    elif annotation is not type(None):
        yield annotation


def _typed(text: str, parts: tuple[Any, ...]) -> Any:
    if int in parts or float in parts or any(isinstance(part, int) for part in parts):
        if _INTEGER.fullmatch(text):
            return int(text)
        if _is_number(text):
            return float(text)
    return text


def _table(text: str) -> Any:
    """Return an inline table, whose braces are optional; text that is not one stays text."""
    try:
        return parse_toml(f"value = {{{text.removeprefix('{').removesuffix('}')}}}")["value"]
    except UnusableFileError:
        return text


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text)) and text.isascii()
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Base:
    """What is known about a job's base; by default, nothing."""

    stated: str = ""
    """Family and base as stated in the job, in one string; a different string means a different base."""
    path_on_disk: str = ""
    """Value of `base.model` if the disk was checked and it is a path; "" otherwise."""
    family: Family | None = None
    zero_terminal_snr: bool = False
    prediction: Prediction | None = None

    def is_path(self, model: str, folder: Path) -> bool:
        """Return whether `model` is a path, as `is_base_path` does, but from known facts instead of the disk."""
        by_form = base_path_by_form(model)
        return model == self.path_on_disk if by_form is None else by_form


@dataclass(frozen=True, slots=True)
class SettingsVerdict:
    """Result of checking a job's values."""

    job: Job | None = None
    """Job with absolute paths; None if it has a fault."""
    sound: Job | None = None
    """Job with faulty values dropped and missing ones filled in; None if faults remain even then."""
    problems: tuple[tuple[str, str], ...] = ()
    """Faults as (key, reason)."""
    effectless: dict[str, str] = field(default_factory=dict)
    """Keys that have no effect with the current settings, whether set or not, each with the reason."""
    doubts: dict[str, str] = field(default_factory=dict)
    """Keys with valid but unusual values, each with the reason why its value is unusual."""


def judge(values: Values, folder: Path, base: Base) -> SettingsVerdict:
    """Check the values of a job file in `folder` without accessing the disk."""
    data = copy.deepcopy(values)
    faults = make_absolute(data, folder, base.is_path)
    try:
        job = Job.model_validate(data)
    except ValidationError as error:
        faults = [*faults, *problems(error, Job)]
    found = tuple(
        _without_placeholder(values, [(key, reason) for key, _, reason in (fault.partition(": ") for fault in faults)])
    )
    sound = job if not found else _sound(data, [key for key, _ in found])
    return SettingsVerdict(
        job=None if found else job,
        sound=sound,
        problems=found,
        effectless=_effectless(sound, base.family) if sound else {},
        doubts=_doubts(sound, base) if sound else {},
    )


def _without_placeholder(values: Values, found: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Replace all faults in the folder list with "images are missing" if no folder has a path.

    A folder entry without a path stores a trigger word that was typed before images were added.
    """
    listed = value_at(values, _FOLDERS)
    if (
        not listed
        or not isinstance(listed, list)
        or any(not isinstance(each, dict) or "path" in each for each in listed)
    ):
        return found
    others = [fault for fault in found if not fault[0].startswith(_FOLDERS)]
    return [*others, (_FOLDERS, "is missing: add the images to train on")]


def _sound(data: Values, wrong: list[str]) -> Job | None:
    """Return the job without its faulty values, so that all other values can be checked despite a bad one.

    Missing required values are filled in. Dropping a value can cause other faults, so this is repeated a few times.
    Return None if faults remain.
    """
    data = copy.deepcopy(data)
    for _ in range(_MAX_ROUNDS):
        for key in wrong:
            # If the key itself is missing, its table cannot be completed, so the whole table is dropped.
            drop(data, key if value_at(data, key) is not None else key.rpartition(".")[0] or key)
        for key, value in _FILLERS.items():
            data.setdefault(key, copy.deepcopy(value))
        try:
            return Job.model_validate(data)
        except ValidationError as error:
            wrong = [fault.partition(": ")[0] for fault in problems(error, Job)]
    return None


def _effectless(job: Job, family: Family | None) -> dict[str, str]:
    """Return the keys without effect, each with the reason.

    For a base of unknown family, return only keys without effect in both families.
    """
    families: tuple[Family, ...] = (family,) if family else ("sd15", "sdxl")
    first, *others = (dict(without_effect(job, one)) for one in families)
    return {key: reason for key, reason in first.items() if all(key in other for other in others)}


def _doubts(job: Job, base: Base) -> dict[str, str]:
    known = job.base.zero_terminal_snr
    certain = known if isinstance(known, bool) else base.zero_terminal_snr
    prediction = base.prediction if job.base.prediction == "auto" else job.base.prediction
    found = doubtful(job, zero_terminal_snr=certain, prediction=prediction, family=base.family)
    return {**dict(found), **dict(prodigy_at_a_small_rate(job.recipe))}
