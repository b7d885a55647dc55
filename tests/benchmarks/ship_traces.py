"""Make assets/traces: the traces and forecast results that plans for built-in recipes on typical GPUs use.

    python -m tests.benchmarks.ship_traces [--missing | --outcomes | --changes]

Traces are made for GPUs of 4 to 32 GB. With --missing the shipped traces stay and those that plans need in addition are
recorded: enough if the planner's choices have changed. With --outcomes only the runs are simulated again: some minutes,
and enough if the allocator's rules or the order of a run have changed. With --changes only the traces of common changes
to a recipe are made, without forecast results: a quarter of an hour.

Takes an hour of one core if nothing is cached; traces that exist, from here or from any plan, are taken from this
user's cache, but every run is simulated again, which takes some minutes. Run it when
tests/train/memory/trace/test_shipped_traces.py reports that the shipped files are out of date.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from tests.benchmarks.built_in import (
    CHANGED_RECIPE,
    COMMON_CHANGES,
    FAMILIES,
    GIGABYTES,
    SYSTEMS,
    all_built_in,
    built_in,
    changed_built_in,
)
from tests.benchmarks.make_fits import RECIPE, preset_text
from trainer.config.base import Family
from trainer.config.fit import PLANNED, FitConfig
from trainer.files.assets import asset_path
from trainer.memory.forecast.forecast import RunSimulator
from trainer.memory.forecast.results import ResultStore, write_outcomes
from trainer.memory.forecast.schedule import PhaseCounts, RunSchedule
from trainer.memory.planner.planner import plan
from trainer.memory.planner.request import PlanRequest
from trainer.memory.trace.derive import IMAGE_COUNTS, RANK_INDEPENDENT, RANKS, SHAPES, Size
from trainer.memory.trace.interpolate import COUNTS, requests
from trainer.memory.trace.library import LARGEST_TRACED, Steps, TraceLibrary
from trainer.memory.trace.memory_trace import MemoryTrace, TraceSummary
from trainer.memory.trace.store import SHIPPED_OUTCOMES, SOURCES_FOLDER, SUFFIX, TraceStore, write_archive
from trainer.memory.trace.workload import TracePart, TraceRequest, Workload, complete_fit, library_versions
from trainer.protocol import files as atomic

INDEX = "index.json"
# The properties of a GPU that a forecast result depends on.
SIZES = ("cublas_workspace_bytes", "cudnn_workspace_share")
# Optimizer steps at these ranks cannot be derived from other ranks; these are the common ones.
OPTIMIZER_RANKS = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128)


Notes = dict[str, dict[str, Any]]


class NotedTraces(TraceLibrary):
    """Traces that note every request, so that its key can be made again from the note."""

    def __init__(self, store: TraceStore) -> None:
        super().__init__(store)
        self.origin: dict[str, str] = {}
        """Names of the recipe that is being planned and of the change to it, if there is one."""
        self.notes = Notes()

    def steps(self, workload: Workload, bucket: Size, pictures: int) -> Steps[MemoryTrace]:
        """Return what TraceLibrary returns, and note the request."""
        self._note(workload, "micro", bucket, pictures)
        return super().steps(workload, bucket, pictures)

    def step_summaries(self, workload: Workload, bucket: Size, pictures: int) -> Steps[TraceSummary]:
        """Return what TraceLibrary returns, and note the request."""
        self._note(workload, "micro", bucket, pictures)
        return super().step_summaries(workload, bucket, pictures)

    def phase(self, workload: Workload, part: TracePart) -> tuple[MemoryTrace, ...]:
        """Return what TraceLibrary returns, and note the request."""
        self._note(workload, part)
        return super().phase(workload, part)

    def phase_summaries(self, workload: Workload, part: TracePart) -> tuple[TraceSummary, ...]:
        """Return what TraceLibrary returns, and note the request."""
        self._note(workload, part)
        return super().phase_summaries(workload, part)

    def _note(self, workload: Workload, part: TracePart, *more: object) -> None:
        request = TraceRequest(workload, part, more)
        note = _note_of(request.workload, **self.origin, part=part, more=request.more)
        self.notes.setdefault(request.key, note)


class NotedRuns(RunSimulator):
    """Simulated runs that note every request."""

    def __init__(self, question: PlanRequest, notes: Notes) -> None:
        super().__init__(question.device_state)
        self.recipe = question.name
        self.notes = notes

    def key(self, schedule: RunSchedule) -> str:
        """Return the key of a run, and note the request."""
        key = super().key(schedule)
        overheads = asdict(self.device_state.overheads)
        self.notes.setdefault(
            key, _note_of(schedule.workload, recipe=self.recipe, **{name: overheads[name] for name in SIZES})
        )
        return key


def _note_of(workload: Workload, **facts: object) -> dict[str, Any]:
    fit = {name: getattr(workload.fit, name) for name in PLANNED}
    return {"family": workload.family, **facts, "fit": fit}


def noted_workload(note: Mapping[str, Any]) -> Workload:
    """Return the workload that a note of the index describes."""
    workload = _question_of(note["family"], note["recipe"], note.get("change")).workload
    workload = replace(workload, fit=complete_fit(FitConfig.model_validate(note["fit"])))
    return workload.at_rank(note["rank"]) if "rank" in note else workload


def request_of(note: Mapping[str, Any]) -> TraceRequest:
    """Return the request for the traces that a note describes."""
    more = (tuple(note["more"][0]), note["more"][1]) if note["part"] == "micro" else ()
    return TraceRequest(noted_workload(note), note["part"], more)


@cache
def _question_of(family: Family, recipe: str, change: str | None = None) -> PlanRequest:
    return built_in(family, recipe, f"{GIGABYTES[0]}GB", SYSTEMS[0], change)


def noted_key(note: Mapping[str, Any]) -> str:
    """Return the key under which this version stores what a note describes."""
    return noted_workload(note).key(note["part"], *note["more"])


def noted_run(note: Mapping[str, Any], traces: TraceLibrary) -> tuple[RunSimulator, RunSchedule]:
    """Return the run that the note of a forecast result describes, and the simulator for its GPU."""
    device_state = _question_of(note["family"], note["recipe"]).device_state
    overheads = replace(device_state.overheads, **{name: note[name] for name in SIZES})
    schedule = RunSchedule(noted_workload(note), traces, PhaseCounts(), device_state.rate)
    return RunSimulator(replace(device_state, overheads=overheads)), schedule


def read_index(folder: Path) -> dict[str, Any]:
    """Return the shipped index: the versions of the libraries that it was made with, and a note for each key."""
    index: dict[str, Any] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    return index


def _asked_for(store: TraceStore, questions: Iterable[PlanRequest]) -> tuple[Notes, Notes]:
    """Return notes of all traces and all runs that plans for these requests and the fit presets use, by key."""
    traces, runs = NotedTraces(store), Notes()
    for question in questions:
        traces.origin = {"recipe": question.name}
        _plan(question, traces, NotedRuns(question, runs))
    traces.origin = {"recipe": RECIPE}
    for family in FAMILIES:
        for gigabytes in GIGABYTES:
            preset_text(family, gigabytes, traces)
    return traces.notes, runs


def _plan(question: PlanRequest, traces: NotedTraces, runs: RunSimulator) -> None:
    """Note what a plan asks for, and print how long it took."""
    began, known = time.perf_counter(), len(traces.traced)
    plan(question.workload, question.written, question.device_state, traces, question.counts, runs=runs)
    took, traced = time.perf_counter() - began, len(traces.traced) - known
    name = ", ".join((question.workload.family, *traces.origin.values(), question.device_state.gpu.name))
    sys.stdout.write(f"{name}: {took:.1f} s, {traced} traced\n")
    sys.stdout.flush()


def _asked_for_changes(store: TraceStore) -> Notes:
    """Return notes of the traces that plans for common changes to a recipe use, by key."""
    traces = NotedTraces(store)
    for change in COMMON_CHANGES:
        traces.origin = {"recipe": CHANGED_RECIPE, "change": change}
        for question in changed_built_in(change):
            _plan(question, traces, RunSimulator(question.device_state))
    # Where nothing fits, plans also ask for smaller recipes, which the notes do not describe.
    return {key: note for key, note in traces.notes.items() if noted_key(note) == key}


def _of_others(notes: Notes) -> Notes:
    """Return further notes: the sources from which any rank and shape is derived, and optimizer steps."""
    found = Notes()
    for note in notes.values():
        for further in _further(note):
            if (key := noted_key(further)) not in notes:
                found[key] = further
    return found


def _further(note: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    part = note["part"]
    if part in RANK_INDEPENDENT and part != "optimizer":
        return
    for rank in OPTIMIZER_RANKS if part == "optimizer" else RANKS:
        if part != "micro":
            yield {**note, "rank": rank}
            continue
        pictures = note["more"][1]
        for size in (pictures,) if pictures <= LARGEST_TRACED else IMAGE_COUNTS:
            yield from ({**note, "rank": rank, "more": [shape, size]} for shape in SHAPES[note["family"]])


def of_sweeps() -> Notes:
    """Return notes of the traces that sweeps of the built-in style recipe interpolate on GPUs with bf16."""
    found = Notes()
    for family, bits, blocks in product(FAMILIES, ("none", "int8", "nf4"), ("none", "full")):
        fit = complete_fit(
            FitConfig.model_validate({"dtype": "bf16", "quantize": bits, "gradient_checkpointing": blocks})
        )
        workload = replace(_question_of(family, RECIPE).workload, fit=fit)
        for request in (each for count in COUNTS for each in requests(workload, count)):
            rank = request.workload.recipe.rank
            found[request.key] = _note_of(request.workload, recipe=RECIPE, part="micro", more=request.more, rank=rank)
    return found


def _make(store: TraceStore, notes: Notes) -> None:
    """Record the traces of these notes in the store."""
    traces = TraceLibrary(store)
    for request in sorted(map(request_of, notes.values()), key=lambda request: request.workload.key("load")):
        traces.read(request)  # similar models are built once


def ship_outcomes(store: TraceStore, folder: Path, questions: Iterable[PlanRequest]) -> tuple[Notes, Notes]:
    """Write forecast results into ``folder``; return the notes of all requested traces, and of the results."""
    with tempfile.TemporaryDirectory() as played:  # results of another version must not be reused
        store.outcomes, store.shipped_outcomes = Path(played), None
        notes, runs = _asked_for(store, questions)
        kept = ResultStore.for_traces(store)
        found = {key: kept.load(key, brief=False) or kept.load(key, brief=True) for key in runs}
        limits = {key: kept.oom_result(key) for key in runs}
    outcomes = {key: outcome for key, outcome in sorted(found.items()) if outcome is not None}
    hindered = {key: several for key, several in sorted(limits.items()) if several}
    write_outcomes(folder / SHIPPED_OUTCOMES, outcomes, hindered)
    return notes, {key: runs[key] for key in outcomes | hindered}


def ship(store: TraceStore, folder: Path, questions: Iterable[PlanRequest]) -> None:
    """Write traces, results and their index into ``folder``, and remove what nothing uses."""
    notes, runs = ship_outcomes(store, folder, questions)
    others = of_sweeps() | _of_others(notes)
    others = {key: note for key, note in others.items() if key not in notes}
    _make(store, others)
    notes |= others
    _write_archives(store, folder, notes)
    notes |= ship_changes(store, folder, notes)
    names = {archive_name(note) for note in notes.values()}
    for path in folder.rglob(f"*{SUFFIX}"):
        if path.relative_to(folder).as_posix() not in names:
            path.unlink()
    write_index(folder, notes, runs)


def ship_changes(store: TraceStore, folder: Path, notes: Notes) -> Notes:
    """Write the traces of common changes into ``folder``; return their notes, without those that ship anyway.

    Sources for other ranks and shapes ship only for unquantized bases with all blocks checkpointed or none: the others
    would take twice the space, and are only needed for alternatives to a plan.
    """
    with tempfile.TemporaryDirectory() as played:  # runs whose results are known would ask for nothing
        store.outcomes, store.shipped_outcomes = Path(played), None
        asked = _asked_for_changes(store)
    asked |= _of_others({key: note for key, note in asked.items() if _is_plain(note)})
    asked = {key: note for key, note in asked.items() if key not in notes}
    _make(store, asked)
    _write_archives(store, folder, asked)
    return asked


def _is_plain(note: Mapping[str, Any]) -> bool:
    whole = note["part"] != "micro" or note["fit"]["gradient_checkpointing"] in ("none", "full")
    return whole and note["fit"]["quantize"] == "none"


def _write_archives(store: TraceStore, folder: Path, notes: Notes) -> None:
    archives: dict[str, dict[str, Sequence[MemoryTrace]]] = {}
    for key, note in sorted(notes.items(), key=lambda entry: _likeness(entry[1])):
        entry = store.load(key)
        assert entry is not None  # it was requested just now
        archives.setdefault(archive_name(note), {})[key] = entry
    (folder / SOURCES_FOLDER).mkdir(exist_ok=True)
    for name, entries in archives.items():
        write_archive(folder / name, entries)


def archive_name(note: Mapping[str, Any]) -> str:
    """Return the file of an entry: together with those that one plan uses, and that are similar."""
    origin = [note[name] for name in ("family", "recipe", "change") if name in note]
    name = "-".join((*origin, note["fit"]["quantize"] or "none")) + SUFFIX
    return f"{SOURCES_FOLDER}/{name}" if "rank" in note or "change" in note else name


def _likeness(note: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a sort key that puts similar entries side by side."""
    fit = note["fit"]
    return (
        note["part"],
        str(note.get("rank")),
        str(fit["dtype"]),
        str(note["more"]),
        str(fit["gradient_checkpointing"]),
        json.dumps(note),
    )


def write_index(folder: Path, notes: Notes, runs: Notes) -> None:
    """Write a note for each key, one per line, and the versions of the libraries."""
    entries, outcomes = (
        ",\n".join(f"{json.dumps(key)}: {json.dumps(note)}" for key, note in sorted(each.items()))
        for each in (notes, runs)
    )
    versions = json.dumps(library_versions())
    content = f'{{"versions": {versions}, "entries": {{\n{entries}\n}}, "outcomes": {{\n{outcomes}\n}}}}\n'
    atomic.write_text(folder / INDEX, content)


def main() -> int:
    """Make them all."""
    folder, user = asset_path("traces"), TraceStore.of_user().folder
    if "--outcomes" in sys.argv[1:]:
        _, runs = ship_outcomes(TraceStore(user, folder), folder, all_built_in())
        write_index(folder, read_index(folder)["entries"], runs)
    elif "--changes" in sys.argv[1:]:
        index = read_index(folder)
        notes = {key: note for key, note in index["entries"].items() if "change" not in note}
        notes |= ship_changes(TraceStore(user, folder), folder, notes)
        write_index(folder, notes, index["outcomes"])
    else:
        shipped = folder if "--missing" in sys.argv[1:] else None
        ship(TraceStore(user, shipped), folder, all_built_in())
    files = [*folder.iterdir()]
    size = sum(path.stat().st_size for path in files)
    sys.stdout.write(f"{len(files)} files in {folder}, {size / 2**20:.1f} MiB\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
