"""A job being edited: its values, faults, differences from its preset, and undo."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from app.core.events import Emitter
from app.core.jobs.job_file import JobFile, Values, changed_keys, drop, put, value_at
from app.core.jobs.settings import Base, SettingsVerdict, arguments, judge, settings
from app.core.tasks import Tasks, handle_only, reraise
from app.core.words import QT_TRANSLATE_NOOP
from trainer.config.base import Family
from trainer.config.credentials import protect, safe_link
from trainer.config.job import Job
from trainer.config.load import read_job_text
from trainer.config.paths import absolute, is_base_path
from trainer.config.presets.preset import Preset
from trainer.config.recipe import LENGTH_KEYS
from trainer.errors import ImpastoError, JobError
from trainer.files.identify import identify_base

TAKEN_OVER = QT_TRANSLATE_NOOP("Train", "another program's change")


class Origin:
    """A preset's recipe over the defaults."""

    def __init__(self, preset: Preset | None) -> None:
        self.preset = preset
        self.values: Values = {}
        """Settings of the preset in the form of a job."""
        if preset is not None and preset.recipe is not None:
            self.values = {"recipe": stated(preset)}

    def stated(self, key: str) -> Any:
        """Return the preset's value of a key; None if it does not set the key."""
        return value_at(self.values, key)

    def differences(self, values: Values) -> Mapping[str, Any]:
        """Return the keys whose value in a job is another, with what it would be (None: absent)."""
        found: dict[str, Any] = {}
        kinds = {value_at(place, "recipe.optimizer.name") or "adamw" for place in (values, self.values)}
        for each in settings():
            if "*" in each.key or each.key in ("name", "base.model") or (each.kind and {each.kind} != kinds):
                continue
            expected = _first(self.stated(each.key), each.default)
            if _first(value_at(values, each.key), each.default) != expected:
                found[each.key] = expected
        return found


def stated(preset: Preset) -> Values:
    """Return what a preset's recipe states, as plain values; raises ValueError for a preset without one."""
    if preset.recipe is None:
        raise ValueError(f"{preset.name} holds no recipe")
    return preset.recipe.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)


def _first(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


@dataclass(frozen=True, slots=True)
class DraftStep:
    """The values before and after one change, and what it changed."""

    name: str
    """Changed key, or a description of the change."""
    before: Values
    after: Values


class Undo:
    """Undo history; characters typed into one field are one step until `seal`."""

    def __init__(self) -> None:
        self._done: list[DraftStep] = []
        self._undone: list[DraftStep] = []
        self._open = False

    @property
    def undo_name(self) -> str | None:
        """Return the name of the step to undo."""
        return self._done[-1].name if self._done else None

    @property
    def redo_name(self) -> str | None:
        """Return the name of the step to redo."""
        return self._undone[-1].name if self._undone else None

    def add(self, name: str, before: Values, after: Values, *, typing: bool = False) -> None:
        """Enter a change; `typing` joins it with the one before, if that is of the same name and not sealed."""
        self._undone.clear()
        if typing and self._open and self._done and self._done[-1].name == name:
            before = self._done.pop().before
        if before != after:
            self._done.append(DraftStep(name, before, copy.deepcopy(after)))
        self._open = typing

    def seal(self) -> None:
        """Make the next change a separate step."""
        self._open = False

    def undo(self) -> DraftStep | None:
        """Undo the last step, so that its `before` applies."""
        self._open = False
        if not self._done:
            return None
        self._undone.append(self._done.pop())
        return self._undone[-1]

    def redo(self) -> DraftStep | None:
        """Redo the undone step, so that its `after` applies."""
        self._open = False
        if not self._undone:
            return None
        self._done.append(self._undone.pop())
        return self._done[-1]


class Draft:
    """A job that is open; belongs to the thread of `tasks`. Every change is judged at once and written behind.

    Wrong values stay, here and in the file, until they are set right; `job` is None meanwhile.
    """

    def __init__(self, path: Path, values: Values, tasks: Tasks) -> None:
        """Open a job file that holds these values, read with `read_values`."""
        self.path = path.absolute()
        self.file = JobFile(self.path, tasks)
        self.changed: Emitter[frozenset[str]] = Emitter()
        """These keys have other values now, or what is said of the job is another (then the set may be empty)."""
        self.taken_over: Emitter[None] = Emitter()
        """Emitted when another program changed the file; its values apply now, and undo restores ours."""
        self.secured: Emitter[str] = Emitter()
        """A password or token was taken out of the base link; the message says where it is now."""
        self.file.own(values)
        self.values = values
        """Values of the file; change them only through these methods."""
        self.origin = Origin(None)
        """What the recipe is compared with."""
        self._tasks = tasks
        self._undo = Undo()
        self._base = Base()
        self._refused: tuple[str, JobError] | None = None
        """Unreadable text that another program wrote, and the reason."""
        self._verdict = SettingsVerdict()
        self.differences: Mapping[str, Any] = {}
        """Keys whose value is another than in the job's preset or by default, with the value there (None: absent)."""
        self._judge()
        self.file.written.connect(lambda _: self._drop_refused())  # the replaced file was backed up

    # --- state

    @property
    def family(self) -> Family | None:
        """Return the facts about the base; None while unknown."""
        return self._base.family

    @property
    def base(self) -> str:
        """The base as `base.model` has it, a path as the whole one that it means; "" where there is none."""
        model = self.get("base.model")
        if not isinstance(model, str) or not model:
            return ""
        return absolute(model, self.path.parent) if self._base.is_path(model, self.path.parent) else model

    @property
    def name(self) -> str:
        """Return the job's name, or its folder's name if it has none."""
        name = self.values.get("name")
        return name if isinstance(name, str) and name.strip() else self.path.parent.name

    @property
    def job(self) -> Job | None:
        """Return the job with absolute paths; None if it has a fault."""
        return self._verdict.job

    @property
    def sound(self) -> Job | None:
        """The job as far as it is right, for what can be said of it while something is wrong or missing."""
        return self._verdict.sound

    @property
    def problems(self) -> tuple[tuple[str, str], ...]:
        """Return the faults as (key, reason)."""
        return self._verdict.problems

    @property
    def effectless(self) -> Mapping[str, str]:
        """Return the keys without effect in this combination, set or not, with the reason."""
        return self._verdict.effectless

    @property
    def doubts(self) -> Mapping[str, str]:
        """Return the keys with valid but unusual values, with the reason."""
        return self._verdict.doubts

    @property
    def undo_name(self) -> str | None:
        """The key, or what was done, that `undo` would take back."""
        return self._undo.undo_name

    @property
    def redo_name(self) -> str | None:
        """The same for `redo`."""
        return self._undo.redo_name

    def get(self, key: str) -> Any:
        """Return the value of a dotted key as it stands in the file; None where it is absent."""
        return value_at(self.values, key)

    # --- changing it

    def set(self, key: str, value: Any, *, typing: bool = False) -> None:
        """Give a key a value of TOML's kinds, right or wrong; `typing`: one of several letters into one field.

        None takes it out of the file, so that its default holds; an item of a list goes whole.
        """

        def work(values: Values) -> None:
            if value is None:
                drop(values, key)
            else:
                put(values, key, value)
                _settle(values, key)

        self.edit(key, work, typing=typing)

    def revert(self, key: str) -> None:
        """Reset a key to the preset's value or the default."""
        self.set(key, self.origin.stated(key))

    def edit(self, name: str, work: Callable[[Values], None], *, typing: bool = False) -> None:
        """Make a change of several keys as one step; `name` is a key, or says what is done."""
        after = copy.deepcopy(self.values)
        work(after)
        after = _writable(after)
        if after != self.values:
            self._undo.add(name, self.values, after, typing=typing)
            self._hold(after)

    def seal(self) -> None:
        """Let what is typed next be a step of its own: the field was left."""
        self._undo.seal()

    def undo(self) -> DraftStep | None:
        """Undo the last change and return it."""
        step = self._undo.undo()
        if step:
            self._hold(copy.deepcopy(step.before))
        return step

    def redo(self) -> DraftStep | None:
        """Redo the undone change and return it."""
        step = self._undo.redo()
        if step:
            self._hold(copy.deepcopy(step.after))
        return step

    def compare_with(self, preset: Preset | None) -> None:
        """Tell the differences from this preset; None: from the defaults."""
        self.origin = Origin(preset)
        self._judge()
        self.changed.emit(frozenset())

    # --- the disk

    def look(self) -> None:
        """See on a worker whether another program changed the file, and take over what it wrote.

        Where something could not be saved, that is tried again instead.
        """
        if self.file.unsaved:
            self.file.retry()
        else:
            values = self.values

            def take_over(text: str) -> None:
                if self.values is values:  # else it was read before what was typed meanwhile was written
                    self._take_over(text)

            # A file that is gone or cannot be read now is written again with the next change.
            unread = handle_only(JobError, lambda _: None)
            self._tasks.run(lambda: read_job_text(self.path), take_over, unread, kept=False)

    def leave(self) -> None:
        """Take back what was told of another program's writing: nobody looks at the job any more."""
        self._drop_refused()

    def close(self) -> None:
        """Write pending changes; raises JobError if that fails."""
        self.file.flush()

    # --- internals

    def _hold(self, values: Values) -> None:
        self._secure(values)
        keys = changed_keys(self.values, values)
        self.values = values
        self._judge()
        self.file.write(values)
        self.changed.emit(keys)

    def _secure(self, values: Values) -> None:
        """Take a password or token out of the base link before anything shows or writes it."""
        model = value_at(values, "base.model")
        if not isinstance(model, str):
            return
        try:
            safe = safe_link(model).text
        except ValueError:  # no link at all: the form says so
            return
        if safe != model:
            put(values, "base.model", safe)
            # On a worker: a locked keyring asks for its password first, and waits for it.
            self._tasks.run(lambda: protect(model)[1] or "", self.secured.emit, reraise)

    def _judge(self) -> None:
        self._look_at_base()
        self._verdict = judge(self.values, self.path.parent, self._base)
        self.differences = self.origin.differences(self.values)

    def _look_at_base(self) -> None:
        """Find out what the base is, on a worker; until then what the job states of it holds."""
        family, model = self.get("base.family"), self.get("base.model")
        if (stated := f"{family} {model}") == self._base.stated:
            return
        asked = self._base = Base(stated, family=family if family in ("sd15", "sdxl") else None)
        if isinstance(model, str) and model:
            folder = self.path.parent
            know = partial(self._know_base, asked)
            self._tasks.run(lambda: _looked_at(asked, model, folder), know, reraise, kept=False)

    def _know_base(self, asked: Base, found: Base) -> None:
        if self._base is not asked or found == asked:
            return
        self._base = found
        self._judge()
        self.changed.emit(frozenset())

    def _take_over(self, text: str) -> None:
        if self.file.unsaved or (self._refused and text == self._refused[0]):
            return
        self._drop_refused()
        if self.file.is_own(text):
            return
        try:
            values = self.file.parse(text)
        except JobError as error:
            self._refused = text, error
            self.file.failed.emit(error)
            return
        self.file.own(values)
        keys = changed_keys(self.values, values)
        if keys:
            self._undo.add(TAKEN_OVER, self.values, values)
            self.values = values
            self._judge()
            self.changed.emit(keys)
            self.taken_over.emit(None)

    def _drop_refused(self) -> None:
        """What could not be read lies there no more."""
        refused, self._refused = self._refused, None
        if refused:
            self.file.resolved.emit(refused[1])


def _settle(values: Values, key: str) -> None:
    """Take out what a new value excludes: another length, arguments that another optimizer does not have."""
    table, _, name = key.rpartition(".")
    if table == "recipe" and name in LENGTH_KEYS:
        for other in LENGTH_KEYS:
            if other != name:
                drop(values, f"recipe.{other}")
    if key == "recipe.optimizer.name":
        known = arguments(values["recipe"]["optimizer"]["name"])
        for argument in set(values["recipe"]["optimizer"]) - known if known else ():
            drop(values, f"recipe.optimizer.{argument}")


def _writable(value: Any) -> Any:
    """The value with a question mark for each half of a surrogate pair, which no file can hold."""
    if isinstance(value, dict):
        return {name: _writable(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_writable(inner) for inner in value]
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else value


def _looked_at(base: Base, model: str, folder: Path) -> Base:
    """Return what the disk tells of a base besides."""
    if not is_base_path(model, folder):
        return base
    base = replace(base, path_on_disk=model)
    try:
        found = identify_base(Path(absolute(model, folder)))
    except (ImpastoError, OSError):
        return base  # whoever picks the base, and the plan, say in words what is wrong with it
    return replace(base, family=base.family or found.family, zero_terminal_snr=bool(found.zero_terminal_snr))
