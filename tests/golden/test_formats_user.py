"""The per-user folder that Impasto 0.1.0 wrote is read with the same meaning: queue, edits, settings, caches."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from app.core.disk.thumbnails import FILE_NAME, Thumbnail, Thumbnails
from app.core.edits.backups import Backups
from app.core.edits.journal import Journal
from app.core.edits.save_state import Key
from app.core.jobs.jobs import Jobs
from app.core.library import Folder, LibraryImage
from app.core.models.models import Choices, ModelChoices
from app.core.models.search import ModelCache
from app.core.models.tools import Installation
from app.core.models.verdict import BaseDescription
from app.core.query.filtering import SavedFilter, SavedFilters
from app.core.query.language import parse
from app.core.query.terms import And, Not, Range, Term
from app.core.runs.watcher import SeenRuns, Unfinished
from app.core.settings import recent
from app.core.settings.preferences import (
    Appearance,
    Judging,
    NotificationPreferences,
    Preferences,
    Settings,
    StartupPreferences,
)
from app.core.settings.recent import RecentFolders
from app.core.tasks import Tasks
from tests.golden.formats.names import command_names, object_names
from tests.golden.test_formats import ROOT, SAMPLES
from trainer import __version__
from trainer.base.fetch import fetch_from_hub, fetch_link
from trainer.dataset.inspection import ImageFacts, InspectionCache
from trainer.files import weights
from trainer.memory.device.calibration import Excess, corrections
from trainer.memory.forecast.results import OomResult, ResultStore
from trainer.memory.trace.memory_trace import Storage, Work
from trainer.memory.trace.store import TraceStore
from trainer.protocol import places
from trainer.protocol.forecast import Peak, PhaseForecast
from trainer.protocol.queue import Queue
from trainer.protocol.queue_entry import Entry
from trainer.protocol.row_store import RowStore
from trainer.protocol.run_directory import forgotten_runs, known_runs

USER = SAMPLES / "user"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FACTS = (1234, 1_700_000_000_000_000_000)
"""Bytes and time of change of the image that the caches speak of."""

IMAGE_COMMANDS = (
    "close", "delete", "folder", "next", "only_shown", "paste", "pick", "previous", "rate_1", "rate_2", "rate_3",
    "rate_4", "rate_5", "reject", "select_all", "undelete", "unrate",
)  # fmt: skip
RENAMED_COMMANDS: dict[str, str] = {
    **{f"pictures.{name}": f"images.{name}" for name in IMAGE_COMMANDS},
    "window.pictures": "window.images",
    "presets.save_picture": "presets.save_image",
    "samples.beside": "samples.side_by_side",
}
"""Ids of commands that were renamed since 0.1.0, with their present ids: the user's own shortcuts have to follow."""
RENAMED_SPLITTERS: dict[str, str] = {"pictures.columns": "images.columns", "pictures.right": "images.right"}
"""Names of splitters that were renamed since, with their present names."""


@pytest.fixture(autouse=True)
def home(per_user_folder: Path) -> Path:
    """The sample as the per-user folder in use."""
    shutil.copytree(USER, per_user_folder, dirs_exist_ok=True)
    return per_user_folder


def post(work: Callable[[], None]) -> None:
    work()


def raw(name: str) -> Any:
    return json.loads((USER / name).read_text(encoding="utf-8"))


# --- runs and the queue


def test_the_list_of_runs(home: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "sample"
    shutil.copytree(SAMPLES / "run", run)
    moved = places.runs_list().read_text(encoding="utf-8").replace(f"{ROOT}/runs/sample", json.dumps(str(run))[1:-1])
    places.runs_list().write_text(moved, encoding="utf-8")
    assert known_runs() == [run]
    assert forgotten_runs() == {Path(ROOT, "runs", "forgotten")}


def test_the_queue() -> None:
    settings = raw("queue/queue.json")
    files = {path.stem: raw(f"queue/entries/{path.name}") for path in (USER / "queue" / "entries").iterdir()}
    found = Queue().read()
    assert found.faults == ()
    assert (found.held, found.reason, found.hold_on_failure) == (True, "The room gets too warm.", True)
    assert [entry.id for entry in found.entries] == settings["order"]
    job, text = Path(ROOT, "queued.toml"), 'schema = 2\nname = "queued"\n'
    added = {file["state"] + ("" if file["job"] else " resumed"): file["added"] for file in files.values()}

    def entry(state: Any, run: str | None = None, **facts: Any) -> Entry:
        place = None if run is None else Path(ROOT, "runs", run)
        return Entry(id="", job=job, run=place, state=state, text=text, added=added[state], **facts)

    expected = {
        "resumed": Entry(
            id="", job=None, run=Path(ROOT, "runs", "sample"), steps=90, added=added["waiting resumed"], text=None
        ),
        "waiting": entry("waiting", after=1_800_000_000.5, hold=True),
        "running": entry("running", "queued", lane="cuda:1", wish="pause", pid=4321, attempts=2),
        "paused": entry("paused", lane="cpu"),
        "interrupted": entry("interrupted", problem="The computer was shut down."),
        "done": entry("done", "queued-2"),
        "stopped": entry("stopped", wish="stop"),
        "failed": entry("failed", problem="There is no room."),
    }
    for one in found.entries:
        name = "resumed" if one.job is None else one.state
        assert vars(one) | {"id": ""} == vars(expected.pop(name)), name
    assert not expected


def test_the_queue_is_written_as_before() -> None:
    for entry in Queue().entries():
        Queue().change(entry.id, lambda same: same)
        written = json.loads((places.home() / "queue" / "entries" / f"{entry.id}.json").read_text(encoding="utf-8"))
        assert written == raw(f"queue/entries/{entry.id}.json")
    Queue().hold("The room gets too warm.")
    assert json.loads(Queue().settings.read_text(encoding="utf-8")) == raw("queue/queue.json")


# --- edits of captions


def test_edits_that_were_not_saved() -> None:
    journal = Journal(places.home() / "captions" / "journal")
    left = journal.adopt()
    root = f"{ROOT}/pictures"
    expected = {
        Key(root, "0.png", "caption"): (("wave 0, blue\n", "sea 0, blue"), "sea 0, green"),
        Key(root, "0.png", "rating"): ((None,), 4),
        Key(root, "1.png", "excluded"): ((False,), True),
        Key(root, "1.png", "crop"): ((None,), (0.1, 0.2, 0.9, 0.8)),
        Key(root, "", "repeats"): ((None,), 3),
        Key(root, "", "regularization"): ((False,), True),
        Key(root, "", "trigger"): ((None,), "sks"),
    }
    found = {request.key: (request.bases, request.desired) for request in left.requests}
    assert found == expected
    assert set(left.crashed) == expected.keys()
    journal.close([])


def test_backups_of_captions() -> None:
    backups = Backups(places.home() / "captions" / "backups")
    root = f"{ROOT}/pictures"
    first, second = backups.versions(root, "0.txt")
    assert (first.data, first.original) == (b"wave 0, blue\n", True)
    assert (second.data, second.original) == (b"wave 0, red\n", False)
    assert [(one.file, one.data) for one in backups.originals(root)] == [("0.txt", b"wave 0, blue\n"), ("2.txt", None)]
    assert first.kept < second.kept


# --- what the app remembers of its user


def test_preferences() -> None:
    settings = Settings()
    assert settings.file.notice == ""
    assert settings.preferences == Preferences(
        appearance=Appearance(look="contrast", scaling=125, language="de"),
        starting=StartupPreferences(reopen=False),
        judging=Judging(resolution=768, tokens=150, lines="variants"),
        telling=NotificationPreferences(notify=False, sound=False),
        shortcuts={"captions.write": ("Ctrl+U", "Alt+U"), "captions.type": ()},
    )


def test_every_command_keeps_the_shortcut_that_the_user_gave_it(per_user_folder: Path) -> None:
    before = (SAMPLES / "commands.txt").read_text(encoding="utf-8").split()
    assert {RENAMED_COMMANDS.get(name, name) for name in before} <= set(command_names())
    (per_user_folder / "preferences.toml").write_text(
        "[shortcuts]\n" + "".join(f'"{name}" = ["Alt+{number}"]\n' for number, name in enumerate(before)), "utf-8"
    )
    assert Settings().preferences.shortcuts == {
        RENAMED_COMMANDS.get(name, name): (f"Alt+{number}",) for number, name in enumerate(before)
    }


def test_filters() -> None:
    filters = SavedFilters(post)
    assert filters.file.notice == ""
    assert filters.of(Path(ROOT, "pictures")) == [
        SavedFilter(name="untagged", query="rating:>=3 -missing:caption", root=None),
        SavedFilter(name="waves", query='tag:"blue wave"', root=Path(ROOT, "pictures")),
    ]
    assert filters.recent == ("wave -night", "excluded:")


def test_queries_of_filters_keep_their_meaning() -> None:
    untagged, waves = raw("filters.json")["filters"]
    assert parse(untagged["query"]).root == And((Term("rating", Range(3.0)), Not(Term("missing", "caption"))))
    assert parse(waves["query"]).root == Term("tag", "blue wave")


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("problem:picture.small rating:>3", "problem:image.small rating:>3"),
        ('-problem:"picture.same_stem"', '-problem:"image.same_stem"'),
        ("problem:info.picture.rotated", "problem:info.image.rotated"),
        ("problem:picture", "problem:image"),
        ("problem:caption.empty picture", "problem:caption.empty picture"),
        ('tag:"picture.small"', 'tag:"picture.small"'),
    ],
)
def test_queries_for_findings_find_them_under_their_present_codes(tmp_path: Path, before: str, now: str) -> None:
    path = tmp_path / "filters.json"
    path.write_text(json.dumps({"filters": [{"name": "a", "query": before}], "recent": [before]}), encoding="utf-8")
    filters = SavedFilters(post, path)
    assert (filters.of(), filters.recent) == ([SavedFilter("a", now)], (now,))


def test_recent_folders() -> None:
    recent = RecentFolders(post)
    assert recent.notice == ""
    assert recent.folders == (Path(ROOT, "pictures"), Path(ROOT, "older"))
    assert recent.folders_to_reopen(wanted=True) == (Path(ROOT, "pictures"),)
    recent.close()


def test_models_and_folders_that_were_chosen() -> None:
    kept = ModelChoices()
    assert kept.notice == ""
    assert kept.choices == Choices(
        recent=(f"{ROOT}/recent/1", f"{ROOT}/recent/2"),
        folders=(f"{ROOT}/folders/1", f"{ROOT}/folders/2"),
        loras=(f"{ROOT}/loras/1", f"{ROOT}/loras/2"),
        passed_over=(f"{ROOT}/passed_over/1", f"{ROOT}/passed_over/2"),
    )


def test_the_window() -> None:
    found, notice = recent.read_window_state()
    expected = {RENAMED_SPLITTERS.get(name, name): text for name, text in raw("window.json").items()}
    assert (found, notice) == (expected, "")
    assert found.keys() - {"geometry", "said.queue"} <= object_names()


def test_the_welcome_was_shown(home: Path) -> None:
    assert not recent.is_first_start()
    (home / "window.json").unlink()
    assert not recent.is_first_start()
    (home / "welcome.json").unlink()
    assert recent.is_first_start()


def test_what_was_going_on_and_which_jobs_are_known() -> None:
    tasks = Tasks(post)
    assert SeenRuns(tasks).content == Unfinished(
        runs=frozenset({Path(ROOT, "runs", "sample")}), entries=frozenset({"0123abcd"})
    )
    jobs = Jobs(tasks)
    assert jobs.notice == ""
    assert jobs.has_agreed_to_cpu(Path(ROOT, "job.toml")) and not jobs.has_agreed_to_cpu(Path(ROOT, "other.toml"))
    tasks.close()


# --- bases


def test_bases_that_were_downloaded(home: Path) -> None:
    path = fetch_link("https://example.com/files/base.safetensors")
    assert path.name == "base.safetensors" and path.parent.parent == home / "models" / "links"
    snapshot = home / "models" / "hub" / "models--owner--name" / "snapshots" / COMMIT
    assert fetch_from_hub("owner/name", COMMIT) == (snapshot, COMMIT)


def test_hashes_of_bases() -> None:
    """Their paths are those of the computer that wrote them; the checksum of each entry includes the path."""
    found = weights._remembered()
    assert found == raw("hashes.json")
    assert [len(facts) for facts in found.values()] == [4, 4]


@pytest.mark.skipif(__version__ != "0.1.0", reason="other versions look at all models again")
def test_what_a_search_for_models_found() -> None:
    known = ModelCache()
    assert known.installations == [
        Installation("ComfyUI", Path(ROOT, "ComfyUI"), (Path(ROOT, "ComfyUI/models"),), (Path(ROOT, "ComfyUI/loras"),))
    ]
    ((path, facts),) = raw("cache/models.json")["told"].items()
    size, changed, said = facts
    assert known._descriptions == {path: [size, changed, said]}
    assert BaseDescription(family=said["family"], velocity=said["velocity"]) == BaseDescription("sd15", False)


# --- what finished runs taught, and what can be computed again


def test_what_finished_runs_taught() -> None:
    """The sums are those of the figures in the sample's two reports, which differ in what this does not ask for."""
    found = corrections("NVIDIA GeForce RTX 3060", "Linux", {"torch": "2.10.0"})
    assert found.damage is None and found.runs == 2
    assert found.context_bytes == 1 << 30  # device less reserved, while training
    assert found.worst == Excess(share=0.5 / 8, bytes=1 << 29)  # 8.5 GiB reserved, 8 GiB forecast
    assert found.shortage == Excess(share=(1 << 20) / (8 << 30), bytes=1 << 20)
    ratio, weight = 650 / (540 / 1.25), 650 / 710
    assert found.time_factor == pytest.approx(math.exp(2 * weight * math.log(ratio) / (2 * weight + 1)))


def test_facts_of_images() -> None:
    store = RowStore(places.cache_folder() / "pictures.sqlite", 1 << 20)
    assert InspectionCache(store).recall(Path("0.png"), FACTS) == ImageFacts(
        id="ef" * 32,
        width=64,
        height=72,
        format="PNG",
        animated=True,
        rotated=True,
        transparent=True,
        profile="broken",
        fingerprint="0123456789abcdef",
    )
    store.close()


def test_thumbnails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the image is not there, so that nothing but the cache can have its thumbnail
    done: SimpleQueue[Callable[[], None]] = SimpleQueue()
    ready: list[Thumbnail] = []
    thumbnails = Thumbnails(done.put, places.cache_folder() / FILE_NAME, threads=1)
    thumbnails.reachable = lambda picture: False
    thumbnails.ready.connect(ready.append)
    thumbnails.request(LibraryImage(1, Folder(Path(), Path()), "0.png", bytes=FACTS[0], changed_ns=FACTS[1]), 256)
    done.get(timeout=60)()
    thumbnails.close()
    (thumbnail,) = ready
    assert (thumbnail.width, thumbnail.height, thumbnail.problem) == (64, 64, None)
    assert len(thumbnail.rgb) == 64 * 64 * 3


def test_memory_traces() -> None:
    found = TraceStore(places.cache_folder() / "traces").load("trace")
    assert found is not None
    (trace,) = found
    assert trace.name == "micro_first"
    assert trace.storages == (
        Storage(bytes=1024, kind="weights", module="unet", stage="load", name="unet.weight"),
        Storage(bytes=2048, kind="activations", module="unet.mid_block", stage="forward", name=None),
        Storage(bytes=4096, kind="gradients", module="unet.mid_block", stage="backward", name=None),
    )
    assert np.array_equal(trace.events, [0, 1, 2, ~1, ~2])
    assert trace.work == (
        Work(kind="gemm", dtype="bfloat16", stage="forward", flops=1000, bytes=3072, count=2),
        Work(kind="attention", dtype="float32", stage="backward", flops=5, bytes=6, count=7),
    )


def test_forecast_results() -> None:
    results = ResultStore.for_traces(TraceStore(places.cache_folder() / "traces"))
    peak = Peak(
        name="decoding",
        module="vae.decoder",
        stage="forward",
        allocated=90,
        by_kind={"weights": 50},
        largest=(("vae.decoder", 30),),
    )
    phase = PhaseForecast(
        phase="cache_pictures",
        allocated=100,
        reserved=200,
        host=300,
        seconds=4.5,
        peaks=(peak,),
        timeline=((10, 20), (90, 100)),
    )
    assert results.load("result", brief=False) == (phase,)
    assert results.oom_result("result") == (OomResult(least=1000, beyond=2000, failed_in="first_step", retries=(0, 2)),)
