"""What becomes of another program's settings: the values of a job, and a report that holds every setting once."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PureWindowsPath
from typing import Any, Literal

from pydantic import ValidationError

from trainer.config.field_names import FIELD_NAMES, value_called
from trainer.config.job import SCHEMA, FolderConfig, Job
from trainer.config.methods import SAMPLERS
from trainer.config.paths import absolute, is_base_path
from trainer.config.problems import problems, validated
from trainer.config.schema import nearest
from trainer.config.toml_file import toml_value
from trainer.errors import JobError
from trainer.importers.datasets import ImportedDataset
from trainer.protocol.text import printable

Outcome = Literal["carried", "changed", "unavailable"]
_OPTIONAL = ("recipe.", "report.", "output.", "fit.")
_ORDER: Sequence[Outcome] = ("carried", "changed", "unavailable")
Kind = Literal["whole", "number", "text", "switch", "list", "numbers"]
_KINDS: Mapping[Kind, str] = {
    "whole": "a whole number",
    "number": "a number",
    "text": "text",
    "switch": "true or false",
    "list": "a list",
    "numbers": "a list of numbers",
}
Moves = Sequence[tuple[str, str]]
"""Folders of another PC, and where they are on this one; the first that fits a path counts."""
_SECRET = re.compile(r"token$|key$|password", re.IGNORECASE)
_LONGEST_VALUE = 80
_LONGEST_ARGUMENT = 2000
MOST_PROMPTS = 100
"""Prompts of previews that are imported."""


@dataclass(frozen=True, slots=True)
class Option:
    """A setting of the other program."""

    kind: Kind
    default: Any = None
    """Its value if a file does not state it, as the program's own code has it."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting that a file states, and what became of it."""

    name: str
    value: Any
    outcome: Outcome
    ours: Mapping[str, Any] = field(default_factory=dict)
    """The values of a job that it became, by dotted key."""
    note: str = ""
    """Why it is not the same here, and what follows from that; empty if it is."""
    lost: tuple[str, ...] = ()
    """Arguments within its value that nothing was made of."""

    @property
    def text(self) -> str:
        """Return its name and value as one short line; a password or token is not shown."""
        value = "***" if _SECRET.search(self.name) else shown(self.value)
        return f"{printable(self.name, _LONGEST_VALUE)} = {value}"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the outcome of a setting comes from, in a program that starts another one with options of its own."""

    options: tuple[str, ...] = ()
    """Options that it becomes."""
    argument: str = ""
    """The argument of the network that it becomes."""
    note: str = ""
    """Why it becomes nothing."""


class Translation:
    """A job being read from another program's settings.

    Values come from the file or, if it does not state them, from the program's defaults, so that a job means what the
    program would have done. Each setting that the file states gets exactly one outcome.
    """

    def __init__(self, program: str, stated: Mapping[str, Any], options: Mapping[str, Option]) -> None:
        """Read what a file states; raises JobError for values that the program could not use either."""
        self.program = program
        self._options = options
        self._stated = {name: self._typed(name, value) for name, value in stated.items()}
        self.values: dict[str, Any] = {}
        """Values of the job, by dotted key."""
        self.settings: list[Setting] = []
        """What became of each stated setting so far."""

    def __getitem__(self, name: str) -> Any:
        """Return an option's value: the file's, or the program's default."""
        return self._stated.get(name, self._options[name].default)

    def states(self, name: str) -> bool:
        """Return whether the file states an option."""
        return name in self._stated

    @property
    def stated(self) -> Mapping[str, Any]:
        """Return the settings that the file states."""
        return self._stated

    def carry(self, names: str, ours: Mapping[str, Any]) -> None:
        """Set values of the job that mean the same as these options, whose names are separated by spaces."""
        self._record(names, "carried", ours)

    def change(self, names: str, ours: Mapping[str, Any], note: str, lost: Iterable[str] = ()) -> None:
        """Set values of the job that do not mean quite the same; `note` says why, and what follows from that."""
        self._record(names, "changed", ours, note, tuple(lost))

    def lack(self, names: str, note: str) -> None:
        """Record that there is nothing like these options here; `note` names what comes nearest."""
        self._record(names, "unavailable", {}, note)

    def finish(self) -> None:
        """Record the settings that nothing was made of, which are those that the program does not know either."""
        known = {setting.name for setting in self.settings}
        for name in self._stated.keys() - known:
            near = nearest(name, [*self._options])
            hint = f"; did you mean {near}?" if near and name not in self._options else ""
            self.lack(name, f"{self.program} has no setting of this name{hint}")

    def leave_out(self, problem: str) -> bool:
        """Leave out the value that a problem of the job is about, and report its setting as changed.

        `problem` is "key: reason". Returns False if the value is none that a job can do without.
        """
        where, _, reason = problem.partition(": ")
        key = next((key for key in self.values if f"{where}.".startswith(f"{key}.")), None)
        if key is None or not key.startswith(_OPTIONAL):
            return False
        del self.values[key]
        for place, setting in enumerate(self.settings):
            if key in setting.ours:
                ours = {name: value for name, value in setting.ours.items() if name != key}
                note = "; ".join(filter(None, (setting.note, f"{key} {reason}; the default is used")))
                lost = (*setting.lost, *_called(key))
                self.settings[place] = replace(setting, outcome="changed", ours=ours, note=note, lost=lost)
        return True

    def of(self, outcome: Outcome) -> list[Setting]:
        """Return the settings with an outcome, in the order of the file."""
        order = [*self._stated]
        found = [setting for setting in self.settings if setting.outcome == outcome]
        return sorted(found, key=lambda setting: order.index(setting.name))

    def restate(
        self,
        program: str,
        stated: Mapping[str, Any],
        origins: Mapping[str, Origin],
        options: Mapping[str, Option],
    ) -> None:
        """Report the settings of a program that starts this one, in place of the options that it passes on."""
        found = {setting.name: setting for setting in self.settings}
        self.program, self._stated, self._options, self.settings = program, dict(stated), options, []
        for name, value in stated.items():
            if origin := origins.get(name):
                outcome, ours, note = _restated(origin, value, found)
                self.settings.append(Setting(name, value, outcome, ours, note))
        self.finish()

    def _record(
        self, names: str, outcome: Outcome, ours: Mapping[str, Any], note: str = "", lost: tuple[str, ...] = ()
    ) -> None:
        self.values.update(ours)
        for name in names.split():
            if name in self._stated:
                if any(setting.name == name for setting in self.settings):
                    raise ValueError(f"{name} already has an outcome")
                self.settings.append(Setting(name, self._stated[name], outcome, ours, note, lost))

    def _typed(self, name: str, value: Any) -> Any:
        """Return a value with its option's type; texts of numbers are read as such, as GUIs write them."""
        option = self._options.get(name)
        return value if option is None else self.typed(name, value, option.kind)

    def typed(self, name: str, value: Any, kind: Kind) -> Any:
        """Return a value as one of this kind; raises JobError with the name of its setting if it is none."""
        try:
            return _CONVERSIONS[kind](value)
        except (ValueError, TypeError, OverflowError):
            sentence = f"{name} must be {_KINDS[kind]}, not {shown(value)}."
            raise JobError("import.value", sentence, f"Correct it in {self.program}'s file.") from None


def _called(key: str) -> tuple[str, ...]:
    """Return the names of a key in all programs."""
    return (key.rpartition(".")[2], *FIELD_NAMES.get(key, ()))


_OFF: Sequence[Any] = (None, False, "", 0, "0", [])


def _restated(origin: Origin, value: Any, found: Mapping[str, Setting]) -> tuple[Outcome, dict[str, Any], str]:
    """Return the outcome, values and note of a setting from those of the options that it became."""
    if origin.note:
        return ("carried", {}, "") if value in _OFF else ("changed", {}, origin.note)
    if origin.argument:
        whole = found.get("network_args", Setting("network_args", None, "carried"))
        if origin.argument in whole.lost:
            return "unavailable", {}, "there is nothing like it here"
        return "carried", {key: made for key, made in whole.ours.items() if origin.argument in _called(key)}, ""
    settings = [found[option] for option in origin.options if option in found]
    outcome: Outcome = max((setting.outcome for setting in settings), key=_ORDER.index, default="carried")
    ours = {key: value for setting in settings for key, value in setting.ours.items()}
    return outcome, ours, "; ".join(dict.fromkeys(setting.note for setting in settings if setting.note))


def shown(value: Any) -> str:
    """Return a value of a stranger's file as short, printable text."""
    if value is None:
        return '""'
    try:
        return printable(toml_value(value), _LONGEST_VALUE)
    except (TypeError, ValueError):
        return printable(str(value), _LONGEST_VALUE)


@dataclass
class ImportedJob:
    """A job that was read from another program's file: its values, and captions that are not beside their images."""

    found: Translation
    folders: tuple[FolderConfig, ...] = ()
    """Folders of a dataset file; empty if the values have them."""
    captions: dict[Path, tuple[str, ...]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What was not imported of a dataset file."""

    def add_dataset(self, dataset: ImportedDataset, moved: Moves) -> None:
        """Add what a dataset file states, with its folders where they are on this PC."""
        self.folders = tuple(
            folder.replaced(path=relocated(folder.path, moved), mask_folder=relocated(folder.mask_folder, moved))
            for folder in dataset.folders
        )
        self.captions.update(dataset.captions)
        self.notes.extend(dataset.notes)

    def table(self, name: str) -> dict[str, Any]:
        """Return the job as the tables of its file, called `name` unless the other file has a name for it."""
        table: dict[str, Any] = {"schema": SCHEMA, "name": name}
        for key, value in self.found.values.items():
            *tables, last = key.split(".")
            place = table
            for each in tables:
                place = place.setdefault(each, {})
            place[last] = value
        if self.folders:
            folders = [folder.model_dump(mode="json", exclude_defaults=True) for folder in self.folders]
            table.setdefault("dataset", {})["folders"] = folders
        return table

    def settle(self) -> None:
        """Leave out values that Impasto does not allow, or not together; those of base and dataset stay."""
        source = {"base": {"model": "own/er"}, "dataset": {"folders": [{"path": "images"}]}}
        while True:
            try:
                Job.model_validate({**self.table("any"), **source})
            except ValidationError as error:
                # One at a time: of two that exclude each other, the other can stay.
                if not any(self.found.leave_out(problem) for problem in problems(error, Job)):
                    return
            else:
                return

    def job(self, name: str) -> Job:
        """Return the job; raises JobError for values that are invalid here."""
        source = f"The job from {self.found.program}"
        return validated(
            Job, self.table(name), "import.invalid", source, "Change this in the file, and import it again."
        )


def relocated(path: Any, moved: Moves) -> Any:
    """Return a path with its start replaced; names are compared as on Windows, and both kinds of slashes fit."""
    if not isinstance(path, str):
        return path
    there = PureWindowsPath(path)
    for old, new in moved:
        start = PureWindowsPath(old)
        if there == start or start in there.parents:
            return str(Path(new, *there.parts[len(start.parts) :]))
    return path


def folder_here(path: str, folder: Path, moved: Moves = ()) -> str:
    """Return a path as it is on this PC, absolute; relative ones start in `folder`, `moved` is as for `relocated`."""
    found = relocated(path, moved)
    return found if PureWindowsPath(found).drive else absolute(_slashed(found), folder)


def base_here(path: Any, folder: Path, moved: Moves) -> Any:
    """Return the path of a model file as `folder_here` does; links, Hub ids and what is no text stay as they are."""
    if not isinstance(path, str) or not path:
        return path
    found = relocated(path, moved)
    return folder_here(path, folder, moved) if is_base_path(_slashed(found), folder) else _slashed(found)


def _slashed(path: str) -> str:
    """Return a path with the slashes that every system reads, unless it has a drive, which only Windows has."""
    return path if PureWindowsPath(path).drive else path.replace("\\", "/")


def sampler_called(name: str) -> str | None:
    """Return the sampler that other programs call so; None if there is none."""
    return name if name in SAMPLERS else value_called("report.previews.prompts.sampler", name)


_CONSTANTS: Mapping[str, bool | None] = {
    **dict.fromkeys(("", "~", "null"), None),
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
}


def plain(value: Any) -> Any:
    """Return the switch, number or nothing that a text in YAML 1.1 stands for; other values as they are."""
    if not isinstance(value, str):
        return value
    if value.lower() in _CONSTANTS:
        return _CONSTANTS[value.lower()]
    try:
        number = float(value)
    except ValueError:
        return value
    if number - number:  # infinite, or not a number
        return value
    return int(number) if number.is_integer() and "." not in value else number


def named_values(listed: Iterable[Any]) -> dict[str, Any]:
    """Return the values of "name=value" texts; those that are no Python literals stay text."""
    values: dict[str, Any] = {}
    for text in listed:
        name, _, value = str(text)[:_LONGEST_ARGUMENT].partition("=")
        try:
            values[name.strip()] = ast.literal_eval(value.strip())
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # all that it raises, by its docs
            values[name.strip()] = value.strip()
    return values


def _whole(value: Any) -> int | None:
    if value is None or value == "":
        return None
    number = float(value)
    if isinstance(value, bool) or not number.is_integer():
        raise ValueError(value)
    return int(number)


def _number(value: Any) -> float | None:
    if value is None or value == "":
        return None
    if isinstance(value, bool):
        raise TypeError(value)
    number = float(value)
    if number - number:  # infinite, or not a number
        raise ValueError(value)
    return int(number) if isinstance(value, int) else number


def _text(value: Any) -> str | None:
    if isinstance(value, Mapping | list | tuple):
        raise TypeError(value)
    return str(value) if value is not None and value != "" else None


def _switch(value: Any) -> bool:
    texts = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False, "": False, "none": False}
    return texts[str(value).strip().lower()] if str(value).strip().lower() in texts else _refused(value)


def _list(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        raise TypeError(value)
    if isinstance(value, str):
        return value.split()
    return list(value) if isinstance(value, Iterable) else ([] if value is None else [value])


def _numbers(value: Any) -> list[float] | None:
    return None if value is None or value == "" else [_number(each) or 0.0 for each in _list(value)]


def _refused(value: Any) -> bool:
    raise ValueError(value)


_CONVERSIONS: Mapping[Kind, Any] = {
    "whole": _whole,
    "number": _number,
    "text": _text,
    "switch": _switch,
    "list": _list,
    "numbers": _numbers,
}
