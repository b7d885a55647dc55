"""Write samples of the files in the per-user folder, with the classes that write them for users."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue

import numpy as np
from safetensors.numpy import save_file

from app.core.disk.thumbnails import FILE_NAME, Thumbnails
from app.core.edits.backups import Backups
from app.core.edits.journal import Journal
from app.core.edits.save_state import Key, SaveRequest
from app.core.jobs.jobs import Jobs
from app.core.library import Folder, LibraryImage
from app.core.models.models import ModelChoices
from app.core.models.search import ModelCache
from app.core.models.tools import Installation
from app.core.query.filtering import SavedFilter, SavedFilters
from app.core.runs.watcher import SeenRuns, Unfinished
from app.core.settings.preferences import (
    Appearance,
    Judging,
    NotificationPreferences,
    Preferences,
    Settings,
    StartupPreferences,
)
from app.core.settings.recent import RecentFolders, remember_welcome, write_window_state
from app.core.tasks import Tasks
from trainer.base.fetch import _Download, _remember
from trainer.config.credentials import safe_link
from trainer.dataset.inspection import ImageFacts, InspectionCache
from trainer.files.weights import sha256_file
from trainer.memory.device.calibration import learn
from trainer.memory.forecast.results import OomResult, ResultStore
from trainer.memory.trace.memory_trace import MemoryTrace, Storage, Work
from trainer.memory.trace.store import TraceStore
from trainer.protocol.forecast import Peak, PhaseForecast
from trainer.protocol.places import cache_folder, home
from trainer.protocol.queue import Queue
from trainer.protocol.queue_entry import Entry, State
from trainer.protocol.report import RunReport
from trainer.protocol.row_store import RowStore
from trainer.protocol.run_directory import forget_run

LINK = "https://example.com/files/base.safetensors"
HUB_MODEL, COMMIT = "owner/name", "0123456789abcdef0123456789abcdef01234567"
SPLITTERS = ("images.columns", "images.right", "presets", "train.columns", "runs.left", "runs")
IMAGE_STATE = (1234, 1_700_000_000_000_000_000)
"""Bytes and time of change of the image that the caches speak of."""
# Databases and journals of other sessions' locks are no formats.
_NO_SAMPLES = shutil.ignore_patterns("*.lock", "lock", "*.log", "*-wal", "*-shm", "lanes", "pictures", "texts", "blobs")


def write_user_folder(target: Path, root: Path, reports: Sequence[RunReport]) -> None:
    """Fill the per-user folder in use, in which a run was trained already, and copy it to `target`."""
    forget_run(root / "runs" / "forgotten")
    _write_queue(root)
    _write_settings(root)
    _write_captions(root)
    _write_models(root)
    _write_caches(root)
    for report in reports:
        assert learn(report) is None
    shutil.copytree(home(), target, ignore=_NO_SAMPLES)


def _post(work: Callable[[], None]) -> None:
    work()


def _write_queue(root: Path) -> None:
    """Write an entry in each state."""
    queue = Queue()
    job = root / "queued.toml"
    job.write_text('schema = 2\nname = "queued"\n', encoding="utf-8")
    waiting = queue.add(job, after=1_800_000_000.5, hold=True)
    resumed = queue.add_run(root / "runs" / "sample", steps=90)
    states: dict[State, dict[str, object]] = {
        "running": {"lane": "cuda:1", "wish": "pause", "pid": 4321, "attempts": 2, "run": root / "runs" / "queued"},
        "paused": {"lane": "cpu"},
        "interrupted": {"problem": "The computer was shut down."},
        "done": {"run": root / "runs" / "queued-2"},
        "stopped": {"wish": "stop"},
        "failed": {"problem": "There is no room."},
    }
    for state, facts in states.items():
        added = queue.add(job)

        def change(entry: Entry, state: State = state, facts: dict[str, object] = facts) -> Entry:
            return dataclasses.replace(entry, state=state, **facts)  # type: ignore[arg-type]

        queue.change(added.id, change)
    queue.move(resumed.id, waiting.id)
    queue.set_hold_on_failure(True)
    queue.hold("The room gets too warm.")


def _write_settings(root: Path) -> None:
    """Write what the app remembers of its user."""
    settings = Settings()
    settings.change(
        Preferences(
            appearance=Appearance(look="contrast", scaling=125, language="de"),
            starting=StartupPreferences(reopen=False),
            judging=Judging(resolution=768, tokens=150, lines="variants"),
            telling=NotificationPreferences(notify=False, sound=False),
            shortcuts={"captions.write": ("Ctrl+U", "Alt+U"), "captions.type": ()},
        )
    )
    settings.file.settle()
    filters = SavedFilters(_post)
    filters.save(SavedFilter("untagged", "rating:>=3 -missing:caption"))
    filters.save(SavedFilter("waves", 'tag:"blue wave"', root / "pictures"))
    filters.remember("excluded:")
    filters.remember("wave -night")
    filters.file.settle()
    recent = RecentFolders(_post)
    recent.opened(root / "older")
    recent.closed(root / "older")
    recent.opened(root / "pictures")
    recent.close()
    kept = ModelChoices()
    for what in ("recent", "folders", "loras", "passed_over"):
        for number in (2, 1):
            kept.put_first(what, f"{root}/{what}/{number}")
    kept.settle()
    write_window_state({"geometry": "AdnQ", "said.queue": "yes"} | dict.fromkeys(SPLITTERS, "AAAA"))
    remember_welcome()
    tasks = Tasks(_post)
    memory = SeenRuns(tasks)
    memory.save(Unfinished(frozenset({root / "runs" / "sample"}), frozenset({"0123abcd"})))
    jobs = Jobs(tasks)
    jobs.agree_to_cpu(root / "job.toml")
    memory.close()
    tasks.close()


def _write_captions(root: Path) -> None:
    """Write the journal of a session that was killed, and backups of what its edits replaced."""
    journal = Journal(home() / "captions" / "journal")
    pictures = str(root / "pictures")

    def request(name: str, field: str, base: object, desired: object) -> SaveRequest:
        return SaveRequest(Key(pictures, name, field), (base,), desired)  # type: ignore[arg-type]

    saved = journal.append("Rename wave to sea", [request("3.png", "caption", "wave 3", "sea 3")])
    journal.end()
    journal.saved(saved)
    journal.append(
        "Rate and crop",
        [
            request("0.png", "caption", "wave 0, blue\n", "sea 0, blue"),
            request("0.png", "rating", None, 4),
            request("1.png", "excluded", False, True),
            request("1.png", "crop", None, (0.1, 0.2, 0.9, 0.8)),
            request("", "repeats", None, 3),
            request("", "regularization", False, True),
            request("", "trigger", None, "sks"),
        ],
    )
    journal.end()
    journal.append("More", [request("0.png", "caption", "sea 0, blue", "sea 0, green")])
    journal.end()
    journal.append("Never completed", [request("2.png", "caption", "wave 2", "sea 2")])
    backups = Backups(home() / "captions" / "backups")
    backups.keep(pictures, [("0.txt", b"wave 0, blue\n"), ("2.txt", None)])
    backups.keep(pictures, [("0.txt", b"wave 0, red\n")])


def _write_models(root: Path) -> None:
    """Write what is known of bases: hashes, downloads, and what a search of the disk found."""
    base = root / "sample-base.safetensors"
    sha256_file(base)
    download = _Download(safe_link(LINK), None, None)
    download.folder.mkdir(parents=True)
    save_file({"weight": np.zeros(2, np.float32)}, download.part)
    download._accept("base.safetensors")
    snapshot = home() / "models" / "hub" / "models--owner--name" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "model_index.json").write_text("{}", encoding="utf-8")
    for key in (f"{HUB_MODEL}@main", f"{HUB_MODEL}@{COMMIT}"):
        _remember(key, snapshot, COMMIT, ["model_index.json"])
    known = ModelCache()
    known.describe(base)
    known.write([Installation("ComfyUI", root / "ComfyUI", (root / "ComfyUI/models",), (root / "ComfyUI/loras",))])


def _write_caches(root: Path) -> None:
    """Write what can be computed again: facts of images, thumbnails, memory traces and forecast results."""
    name = cache_folder() / "pictures.sqlite"
    name.unlink(missing_ok=True)
    store = RowStore(name, 1 << 20)
    facts = ImageFacts(
        id="ef" * 32, width=64, height=72, format="PNG", animated=True, rotated=True, transparent=True,
        profile="broken", fingerprint="0123456789abcdef",
    )  # fmt: skip
    InspectionCache(store).keep(Path("0.png"), IMAGE_STATE, facts)
    store.close()
    _write_thumbnail(root)
    traces = TraceStore(cache_folder() / "traces")
    traces.save("trace", [tape()])
    outcome = PhaseForecast(
        phase="cache_pictures", allocated=100, reserved=200, host=300, seconds=4.5, timeline=((10, 20), (90, 100)),
        peaks=(Peak("decoding", "vae.decoder", "forward", 90, {"weights": 50}, (("vae.decoder", 30),)),),
    )  # fmt: skip
    results = ResultStore.for_traces(traces)
    results.save("result", (outcome,))
    results.save_oom("result", OomResult(1000, 2000, "first_step", (0, 2)))


def _write_thumbnail(root: Path) -> None:
    """Have the thumbnail of an image made that is found by a relative path: its key is the same everywhere."""
    former = Path.cwd()
    os.chdir(root / "pictures")
    done: SimpleQueue[Callable[[], None]] = SimpleQueue()
    thumbnails = Thumbnails(done.put, cache_folder() / FILE_NAME, threads=1)
    thumbnails.request(
        LibraryImage(1, Folder(Path(), Path()), "0.png", bytes=IMAGE_STATE[0], changed_ns=IMAGE_STATE[1]), 256
    )
    done.get(timeout=60)()
    thumbnails.close()
    os.chdir(former)


def tape() -> MemoryTrace:
    """Return a trace with storages and work of several kinds."""
    storages = (
        Storage(1024, "weights", "unet", "load", "unet.weight"),
        Storage(2048, "activations", "unet.mid_block", "forward"),
        Storage(4096, "gradients", "unet.mid_block", "backward"),
    )
    work = (Work("gemm", "bfloat16", "forward", 1000, 3072, 2), Work("attention", "float32", "backward", 5, 6, 7))
    return MemoryTrace("micro_first", storages, np.array([0, 1, 2, ~1, ~2], np.int32), work)
