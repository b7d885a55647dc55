"""What ships in assets/traces is what this version would make; with other libraries it is merely not found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.benchmarks.built_in import CHANGED_RECIPE, COMMON_CHANGES, built_in
from tests.benchmarks.ship_traces import INDEX, archive_name, noted_key, noted_run, of_sweeps, read_index, request_of
from trainer.files.assets import asset_path
from trainer.memory.forecast.results import ForecastResult, OomResult, ResultStore, is_full, write_outcomes
from trainer.memory.planner.planner import SMALLER, plan
from trainer.memory.trace.library import TraceLibrary
from trainer.memory.trace.memory_trace import summary_of
from trainer.memory.trace.store import SHIPPED_OUTCOMES, SUFFIX, Archive, TraceStore
from trainer.memory.trace.workload import TraceRequest, library_versions
from trainer.protocol.forecast import ForecastPhase

REMEDY = "run python -m tests.benchmarks.ship_traces and commit assets/traces"


Notes = Mapping[str, Mapping[str, Any]]


@pytest.fixture(scope="module")
def index() -> Mapping[str, Notes]:
    found = read_index(asset_path("traces"))
    if tuple(found["versions"]) != library_versions():
        pytest.skip("made with other versions of the libraries, so they are not found here")
    return found


@pytest.fixture
def entries(index: Mapping[str, Notes]) -> Notes:
    return index["entries"]


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> TraceLibrary:
    """The tapes that ship, and no others; nothing is kept between runs."""
    store = TraceStore(tmp_path_factory.mktemp("own"), asset_path("traces"))
    store.outcomes, store.shipped_outcomes = tmp_path_factory.mktemp("played"), None
    return TraceLibrary(store, _missing)


def _missing() -> None:
    raise AssertionError(f"a tape does not ship: {REMEDY}")


def test_every_shipped_file_is_in_the_index_and_all_of_them_are_small() -> None:
    folder = asset_path("traces")
    entries = read_index(folder)["entries"]
    archives = {path.relative_to(folder).as_posix() for path in folder.rglob(f"*{SUFFIX}")}
    assert archives == {archive_name(note) for note in entries.values()}
    for key, note in entries.items():
        assert key in Archive(folder / archive_name(note))
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 13.7e6
    others = {path.name for path in files if path.suffix != SUFFIX}
    assert others == {INDEX, SHIPPED_OUTCOMES, "README.md"}


def test_shipped_keys_are_those_that_are_asked_for(entries: Notes) -> None:
    """A key holds all that its tapes depend on: when a recipe, a config or the form changes, others are asked for."""
    stale = [note for key, note in entries.items() if noted_key(note) != key]
    assert not stale, f"{len(stale)} of {len(entries)} are not asked for any more: {REMEDY}"


def test_notes_of_sweeps_name_the_traces_that_a_sweep_reads() -> None:
    """They are shipped together with what plans ask for, so that a sweep has nothing to trace."""
    notes = of_sweeps()
    assert len(notes) == 2 * 3 * 2 * 3 * 4  # families, bits, checkpointing, batches, and two ranks at two shapes
    assert all(noted_key(note) == key for key, note in notes.items())


# Those that take little to trace again; between them they go through most of what is traced.
@pytest.mark.parametrize(
    ("family", "part", "fit"),
    [
        ("sd15", "micro", {"dtype": "bf16", "quantize": "none", "gradient_checkpointing": "none", "micro_batch": 1}),
        ("sd15", "optimizer", {"dtype": "bf16"}),
        ("sd15", "preview", {"dtype": "bf16", "quantize": "none", "vae_tiling": True}),
        ("sdxl", "load", {"dtype": "bf16", "quantize": "none"}),
        ("sdxl", "cache_pictures", {}),
    ],
)
def test_tracing_again_gives_what_ships(
    entries: Notes, tmp_path: Path, family: str, part: str, fit: Mapping[str, Any]
) -> None:
    key, note = next(
        (key, note)
        for key, note in entries.items()
        if (note["family"], note["part"]) == (family, part) and fit.items() <= note["fit"].items()
    )
    shipped = TraceStore(tmp_path / "none", asset_path("traces")).load(key)
    traces = TraceLibrary(TraceStore(tmp_path))
    traces.read(request_of(note))
    assert traces.traced[0] == key
    made = traces.store.load(key)
    assert made is not None
    assert shipped is not None
    for one, other in zip(made, shipped, strict=True):
        assert summary_of(one) == summary_of(other), REMEDY
        assert one.storages == other.storages, REMEDY
        assert one.events.tolist() == other.events.tolist(), REMEDY


# Neither ships, nor does the shape at any rank.
RANK = 48
SHAPES: dict[str, tuple[int, int]] = {"sd15": (576, 448), "sdxl": (832, 1216)}


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_a_recipe_at_another_rank_and_shape_needs_no_trace(entries: Notes, shipped: TraceLibrary, family: str) -> None:
    """Whatever a plan for the recipe asked for follows from what ships; optimizers ship for common ranks."""
    wishes = [elsewhere(request_of(note)) for note in entries.values() if is_of_character(note, family)]
    asked = [wish for wish in wishes if wish.part not in ("cache_pictures", "cache_texts")]
    assert {"micro", "optimizer", "preview", "validate"} < {wish.part for wish in asked}
    assert all(map(shipped.has, asked))
    for wish in asked:
        if wish.part in ("load", "quantise"):  # one of them is no tape at all
            shipped.read(wish)


def is_of_character(note: Mapping[str, Any], family: str) -> bool:
    """Whether the plan of the family's character recipe asked for it, on cards with bf16 and with the base as it is."""
    asked = (note["family"], note["recipe"], note["fit"]["quantize"], note["fit"]["dtype"])
    return asked == (family, "character", "none", "bf16") and "rank" not in note


def elsewhere(wish: TraceRequest) -> TraceRequest:
    """The same for another rank, and for training in another shape."""
    more = (SHAPES[wish.workload.family], wish.more[1]) if wish.part == "micro" else wish.more
    return replace(wish, workload=wish.workload.at_rank(RANK), more=more)


@pytest.mark.parametrize("family", ["sd15", pytest.param("sdxl", marks=pytest.mark.slow)])
def test_tapes_of_another_rank_and_shape_are_those_that_a_trace_gives(
    entries: Notes, shipped: TraceLibrary, tmp_path: Path, family: str
) -> None:
    first = next(note for note in entries.values() if is_of_character(note, family) and note["part"] == "micro")
    wish, real = elsewhere(request_of(first)), TraceLibrary(TraceStore(tmp_path))
    shipped.read(wish)
    real.read(wish)
    assert real.traced == [wish.key]
    for one, traced in zip(shipped.store.load(wish.key) or (), real.store.load(wish.key) or (), strict=True):
        assert (one.storages, one.work) == (traced.storages, traced.work)
        assert one.events.tolist() == traced.events.tolist()


def of_change(entries: Notes, change: str) -> list[TraceRequest]:
    """Requests of plans for a changed recipe, from which other ranks and shapes are derived."""
    return [
        request_of(note)
        for note in entries.values()
        if note.get("change") == change and note["fit"]["quantize"] == "none" and "rank" not in note
    ]


@pytest.mark.parametrize("change", COMMON_CHANGES)
def test_a_common_change_needs_no_trace_to_find_the_best_plan(
    entries: Notes, shipped: TraceLibrary, change: str
) -> None:
    question = built_in("sdxl", CHANGED_RECIPE, "8GB", "Linux", change)
    planned = plan(question.workload, question.written, question.device_state, shipped, question.counts, others=False)
    assert planned.pick is not None and planned.left_out == ()
    whole = [
        wish for wish in of_change(entries, change) if wish.workload.fit.gradient_checkpointing in ("none", "full")
    ]
    assert {"micro", "optimizer", "preview", "validate"} < {wish.part for wish in whole}
    assert all(map(shipped.has, map(elsewhere, whole)))


@pytest.mark.slow
@pytest.mark.parametrize("change", COMMON_CHANGES)
def test_tapes_of_a_common_change_at_another_rank_and_shape_are_those_that_a_trace_gives(
    entries: Notes, shipped: TraceLibrary, tmp_path: Path, change: str
) -> None:
    real, seen = TraceLibrary(TraceStore(tmp_path)), set()
    for wish in map(elsewhere, of_change(entries, change)):
        fit = wish.workload.fit
        kind = wish.part, fit.stream, fit.gradient_checkpointing
        if wish.part not in ("micro", "preview", "validate") or kind in seen or not shipped.has(wish):
            continue
        seen.add(kind)
        for one, traced in zip(shipped.read(wish), real.read(wish), strict=True):
            assert (one.storages, one.work) == (traced.storages, traced.work)
            assert one.events.tolist() == traced.events.tolist()
    assert len(seen) >= 6


def test_shipped_outcomes_are_those_that_are_asked_for(index: Mapping[str, Notes], shipped: TraceLibrary) -> None:
    store = ResultStore.for_traces(TraceStore(Path("nowhere"), asset_path("traces")))
    for key, note in index["outcomes"].items():
        runs, course = noted_run(note, shipped)
        assert runs.key(course) == key, REMEDY
        assert store.load(key, brief=True) is not None or store.oom_result(key)


def wrong(store: ResultStore, notes: Notes, traces: TraceLibrary) -> list[str]:
    """The keys of outcomes that are not what their tapes come to."""
    found = []
    for key, note in notes.items():
        kept = store.load(key, brief=False) or store.load(key, brief=True)
        assert kept is not None
        runs, course = noted_run(note, traces)
        if runs.unlimited_result(course, brief=not is_full(kept)) != kept:
            found.append(key)
    return found


@pytest.fixture(scope="module")
def looked_at(index: Mapping[str, Notes]) -> Notes:
    """Of each family an unquantized and a quantized run."""
    store = ResultStore.for_traces(TraceStore(Path("nowhere"), asset_path("traces")))
    notes = {key: note for key, note in index["outcomes"].items() if store.load(key, brief=True) is not None}
    kinds = {(note["family"], note["fit"]["quantize"] == "none"): key for key, note in notes.items()}
    return {key: notes[key] for key in kinds.values()}


def test_playing_again_gives_what_ships(looked_at: Notes, shipped: TraceLibrary) -> None:
    store = ResultStore.for_traces(TraceStore(Path("nowhere"), asset_path("traces")))
    assert not wrong(store, looked_at, shipped), REMEDY


def test_playing_again_within_a_limit_gives_what_ships(index: Mapping[str, Notes], shipped: TraceLibrary) -> None:
    """Of each family that run which ends soonest: a phase before training, where there is one."""
    store = ResultStore.for_traces(TraceStore(Path("nowhere"), asset_path("traces")))
    soonest: dict[str, tuple[int, str, OomResult]] = {}
    for key, note in index["outcomes"].items():
        for found in store.oom_result(key):
            phases = get_args(ForecastPhase)
            end = phases.index(found.failed_in) if found.failed_in else len(phases)
            soonest[note["family"]] = min(
                soonest.get(note["family"], (end, key, found)), (end, key, found), key=itemgetter(0)
            )
    for _, key, found in soonest.values():
        runs, course = noted_run(index["outcomes"][key], shipped)
        for capacity in (found.least, found.beyond - 1):
            assert runs.simulate(course, capacity).oom_result == found, REMEDY


def test_what_is_called_smaller_takes_less_of_the_card(index: Mapping[str, Notes], shipped: TraceLibrary) -> None:
    """Of a whole run: pictures one by one alone would not do here, as previews take as much as training did."""
    del index  # skips where the tapes are those of other libraries
    question = built_in("sd15", "likeness", "RTX 3060", "Linux")
    planned = plan(question.workload, question.written, question.device_state, shipped, question.counts)
    assert planned.pick is not None and planned.smaller is not None
    assert planned.smaller.forecast.reserved <= SMALLER * planned.pick.forecast.reserved
    assert planned.smaller.fit.preview_offload and not planned.pick.fit.preview_offload
    assert planned.floor is None and not planned.smallest


def test_a_wrong_outcome_would_be_noticed(looked_at: Notes, shipped: TraceLibrary, tmp_path: Path) -> None:
    sound = ResultStore.for_traces(TraceStore(Path("nowhere"), asset_path("traces")))
    key = next(key for key, note in looked_at.items() if note["family"] == "sd15")
    kept = sound.load(key, brief=False) or sound.load(key, brief=True)
    assert kept is not None
    for place in range(len(kept)):
        write_outcomes(tmp_path / "wrong.zip", {key: _spoilt(kept, place)})
        store = ResultStore(tmp_path / "none", tmp_path / "wrong.zip")
        assert wrong(store, {key: looked_at[key]}, shipped) == [key]


def _spoilt(outcome: ForecastResult, place: int) -> ForecastResult:
    """With one number of one phase another."""
    phase = replace(outcome[place], reserved=outcome[place].reserved + 2**21)
    return (*outcome[:place], phase, *outcome[place + 1 :])
