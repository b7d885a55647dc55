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
from trainer.config.job import ALTERNATIVES, Job
from trainer.config.load import read_job_text
from trainer.config.paths import absolute, is_base_path
from trainer.config.presets.preset import Preset
from trainer.errors import ImpastoError, JobError
from trainer.files.identify import identify_base

TAKEN_OVER = QT_TRANSLATE_NOOP("Train", "another program's change")


class Origin:
    """Values that a job is compared with: those that a preset's recipe sets, and the defaults for all other keys."""

    def __init__(self, preset: Preset | None) -> None:
        self.preset = preset
        self.values: Values = {}
        """Settings of the preset, structured like the values of a job."""
        if preset is not None and preset.recipe is not None:
            self.values = {"recipe": stated(preset)}

    def stated(self, key: str) -> Any:
        """Return the preset's value of a key; None if it does not set the key."""
        return value_at(self.values, key)

    def differences(self, values: Values) -> Mapping[str, Any]:
        """Return the keys whose values in a job differ from the preset's value or the default, each with that value.

        The value is None if the preset does not set the key and it has no default.
        """
        found: dict[str, Any] = {}
        kinds = {value_at(place, "recipe.optimizer.name") or "adamw" for place in (values, self.values)}
        for each in settings():
            if "*" in each.key or each.key in ("name", "base.model") or (each.kind and {each.kind} != kinds):
                continue
            expected = _value_or(self.stated(each.key), each.default)
            if _value_or(value_at(values, each.key), each.default) != expected:
                found[each.key] = expected
        return found


def stated(preset: Preset) -> Values:
    """Return the settings that a preset's recipe sets, as plain values; raises ValueError if it has no recipe."""
    if preset.recipe is None:
        raise ValueError(f"{preset.name} has no recipe")
    return preset.recipe.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)


def _value_or(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


@dataclass(frozen=True, slots=True)
class DraftStep:
    """One undoable change: the values before and after it."""

    name: str
    """Changed key, or a description of the change."""
    before: Values
    after: Values


class Undo:
    """Undo history; characters typed into one field form one step until `seal` is called."""

    def __init__(self) -> None:
        self._done: list[DraftStep] = []
        self._undone: list[DraftStep] = []
        self._is_joinable = False

    @property
    def undo_name(self) -> str | None:
        """Return the name of the step to undo."""
        return self._done[-1].name if self._done else None

    @property
    def redo_name(self) -> str | None:
        """Return the name of the step to redo."""
        return self._undone[-1].name if self._undone else None

    def add(self, name: str, before: Values, after: Values, *, typing: bool = False) -> None:
        """Add a change; with `typing`, merge it into the previous one if that has the same name and is not sealed."""
        self._undone.clear()
        if typing and self._is_joinable and self._done and self._done[-1].name == name:
            before = self._done.pop().before
        if before != after:
            self._done.append(DraftStep(name, before, copy.deepcopy(after)))
        self._is_joinable = typing

    def seal(self) -> None:
        """Make the next change a separate step."""
        self._is_joinable = False

    def undo(self) -> DraftStep | None:
        """Mark the last step as undone and return it; the caller applies its `before`. Return None if there is none."""
        self._is_joinable = False
        if not self._done:
            return None
        self._undone.append(self._done.pop())
        return self._undone[-1]

    def redo(self) -> DraftStep | None:
        """Reverse the last `undo` and return its step; the caller applies its `after`. Return None if there is none."""
        self._is_joinable = False
        if not self._undone:
            return None
        self._done.append(self._undone.pop())
        return self._done[-1]


class Draft:
    """An open job, checked on every change and saved in the background. Use it only from the thread of `tasks`.

    Invalid values stay, here and in the file, until they are corrected; `job` is None until then.
    """

    def __init__(self, path: Path, values: Values, tasks: Tasks) -> None:
        """Create the draft of a job file with its values, as `read_values` returns them."""
        self.path = path.absolute()
        self.file = JobFile(self.path, tasks)
        self.changed: Emitter[frozenset[str]] = Emitter()
        """Emitted with the keys whose values changed; the set is empty if only the verdict or differences changed."""
        self.external_change_applied: Emitter[None] = Emitter()
        """Emitted when another program's change to the file was applied to the job; `undo` reverts it."""
        self.secured: Emitter[str] = Emitter()
        """Emitted when a password or token was removed from the base link; the message says where it is now."""
        self.file.set_known_values(values)
        self.values = values
        """Values of the file; change them only through these methods."""
        self.origin = Origin(None)
        """The preset and defaults that the job is compared with."""
        self._tasks = tasks
        self._undo = Undo()
        self._base = Base()
        self._unreadable: tuple[str, JobError] | None = None
        """Invalid text that another program wrote to the file, and the error that was reported."""
        self._verdict = SettingsVerdict()
        self.differences: Mapping[str, Any] = {}
        """Keys whose values differ from the preset or default, each with the expected value (None if there is none)."""
        self._judge()
        self.file.written.connect(lambda _: self._clear_unreadable())  # the replaced file was backed up

    # --- state

    @property
    def family(self) -> Family | None:
        """Return the base's family; None while unknown."""
        return self._base.family

    @property
    def base(self) -> str:
        """Return `base.model`, with a path made absolute; "" if it is not set."""
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
    def valid_part(self) -> Job | None:
        """Return the job without its faulty values, so that the rest can be used; None if that is not possible."""
        return self._verdict.sound

    @property
    def problems(self) -> tuple[tuple[str, str], ...]:
        """Return the faults as (key, reason)."""
        return self._verdict.problems

    @property
    def effectless(self) -> Mapping[str, str]:
        """Return the keys that have no effect with the current settings, whether set or not, each with the reason."""
        return self._verdict.effectless

    @property
    def doubts(self) -> Mapping[str, str]:
        """Return the keys with valid but unusual values, each with the reason why its value is unusual."""
        return self._verdict.doubts

    @property
    def undo_name(self) -> str | None:
        """Return the name of the step that `undo` reverts; None if there is none."""
        return self._undo.undo_name

    @property
    def redo_name(self) -> str | None:
        """Return the name of the step that `redo` applies again; None if there is none."""
        return self._undo.redo_name

    def get(self, key: str) -> Any:
        """Return the value of a dotted key as stated in the file; None if it is absent."""
        return value_at(self.values, key)

    # --- changing it

    def set(self, key: str, value: Any, *, typing: bool = False) -> None:
        """Set a key to a value, valid or not; `typing` merges keystrokes in one field into a single undo step.

        The value None removes the key, so that its default applies, or removes an item from a list.
        """

        def work(values: Values) -> None:
            if value is None:
                drop(values, key)
            else:
                put(values, key, value)
                _drop_excluded(values, key)

        self.edit(key, work, typing=typing)

    def revert(self, key: str) -> None:
        """Reset a key to the preset's value or the default."""
        self.set(key, self.origin.stated(key))

    def edit(self, name: str, work: Callable[[Values], None], *, typing: bool = False) -> None:
        """Change several keys as one undo step; `name` is a key or describes the change."""
        after = copy.deepcopy(self.values)
        work(after)
        after = _writable(after)
        if after != self.values:
            self._undo.add(name, self.values, after, typing=typing)
            self._apply(after)

    def seal(self) -> None:
        """Make the next change a separate undo step, because the field lost the focus."""
        self._undo.seal()

    def undo(self) -> DraftStep | None:
        """Undo the last change and return it; return None if there is none."""
        step = self._undo.undo()
        if step:
            self._apply(copy.deepcopy(step.before))
        return step

    def redo(self) -> DraftStep | None:
        """Redo the last undone change and return it; return None if there is none."""
        step = self._undo.redo()
        if step:
            self._apply(copy.deepcopy(step.after))
        return step

    def compare_with(self, preset: Preset | None) -> None:
        """Compare the job with this preset from now on, or with the defaults if it is None."""
        self.origin = Origin(preset)
        self._judge()
        self.changed.emit(frozenset())

    # --- the disk

    def check_file(self) -> None:
        """Check on a worker whether another program changed the file, and apply its values.

        If our own changes are not saved yet, try to save them instead.
        """
        if self.file.unsaved:
            self.file.retry()
        else:
            values = self.values

            def take_over(text: str) -> None:
                if self.values is values:  # otherwise the text was read before a newer change of ours was written
                    self._take_over(text)

            # Ignored: the next change writes a missing or unreadable file again.
            unread = handle_only(JobError, lambda _: None)
            self._tasks.run(lambda: read_job_text(self.path), take_over, unread, kept=False)

    def withdraw_errors(self) -> None:
        """Withdraw the error about invalid text in the file, if any, because the job is being closed."""
        self._clear_unreadable()

    def close(self) -> None:
        """Write pending changes; raises JobError if that fails."""
        self.file.flush()

    # --- internals

    def _apply(self, values: Values) -> None:
        self._secure(values)
        keys = changed_keys(self.values, values)
        self.values = values
        self._judge()
        self.file.write(values)
        self.changed.emit(keys)

    def _secure(self, values: Values) -> None:
        """Remove a password or token from the base link before it is shown or written."""
        model = value_at(values, "base.model")
        if not isinstance(model, str):
            return
        try:
            safe = safe_link(model).text
        except ValueError:  # not a valid link; the form reports it
            return
        if safe != model:
            put(values, "base.model", safe)
            # On a worker, because a locked keyring first asks for its password.
            self._tasks.run(lambda: protect(model)[1] or "", self.secured.emit, reraise)

    def _judge(self) -> None:
        self._find_base()
        self._verdict = judge(self.values, self.path.parent, self._base)
        self.differences = self.origin.differences(self.values)

    def _find_base(self) -> None:
        """Identify the base on a worker; until then, use the family that the job states."""
        family, model = self.get("base.family"), self.get("base.model")
        if (stated := f"{family} {model}") == self._base.stated:
            return
        requested = self._base = Base(stated, family=family if family in ("sd15", "sdxl") else None)
        if isinstance(model, str) and model:
            folder = self.path.parent
            know = partial(self._on_base_found, requested)
            self._tasks.run(lambda: _identified(requested, model, folder), know, reraise, kept=False)

    def _on_base_found(self, requested: Base, found: Base) -> None:
        if self._base is not requested or found == requested:
            return
        self._base = found
        self._judge()
        self.changed.emit(frozenset())

    def _take_over(self, text: str) -> None:
        if self.file.unsaved or (self._unreadable and text == self._unreadable[0]):
            return
        self._clear_unreadable()
        if self.file.is_own(text):
            return
        try:
            values = self.file.parse(text)
        except JobError as error:
            self._unreadable = text, error
            self.file.failed.emit(error)
            return
        self.file.set_known_values(values)
        keys = changed_keys(self.values, values)
        if keys:
            self._undo.add(TAKEN_OVER, self.values, values)
            self.values = values
            self._judge()
            self.changed.emit(keys)
            self.external_change_applied.emit(None)

    def _clear_unreadable(self) -> None:
        """Withdraw the error about invalid text in the file, if one was reported."""
        refused, self._unreadable = self._unreadable, None
        if refused:
            self.file.resolved.emit(refused[1])


def _drop_excluded(values: Values, key: str) -> None:
    """Remove keys that a new value rules out: its alternatives, or arguments of the previous optimizer."""
    table, _, name = key.rpartition(".")
    if name in (others := ALTERNATIVES.get(table, ())):
        for other in others:
            if other != name:
                drop(values, f"{table}.{other}")
    if key == "recipe.optimizer.name":
        known = arguments(values["recipe"]["optimizer"]["name"])
        for argument in set(values["recipe"]["optimizer"]) - known if known else ():
            drop(values, f"recipe.optimizer.{argument}")


def _writable(value: Any) -> Any:
    """Return the value with "?" for each unpaired surrogate, which UTF-8 cannot encode."""
    if isinstance(value, dict):
        return {name: _writable(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_writable(inner) for inner in value]
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else value


def _identified(base: Base, model: str, folder: Path) -> Base:
    """Return the facts about a base, completed with those in its files if it is on disk."""
    if not is_base_path(model, folder):
        return base
    base = replace(base, path_on_disk=model)
    try:
        found = identify_base(Path(absolute(model, folder)))
    except (ImpastoError, OSError):
        return base  # the base picker and the plan report the problem
    return replace(
        base,
        family=base.family or found.family,
        zero_terminal_snr=bool(found.zero_terminal_snr),
        prediction=found.prediction,
    )
