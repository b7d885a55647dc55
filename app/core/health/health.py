"""Findings and chart data of the open datasets, kept up to date with the library.

An image is judged whenever it changes, which takes a few microseconds, so editing one caption costs the same in a
dataset of any size. If many images changed, they are judged in batches between window events. Worker processes inspect
the files (inspector.py); a worker thread counts rare and frequent tags on `refresh`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from app.core.edits.history import Edit
from app.core.events import Emitter
from app.core.health.groups import ImageIndex, JudgingTarget, SharedIndex
from app.core.health.inspector import InspectedImage, InspectionBatch, Inspector
from app.core.library import Folder, Library, LibraryChange, LibraryImage
from app.core.query.tokens import TokenCounts
from app.core.tags.index import Row, TagIndex
from app.core.tasks import Post, Tasks, iterate_yielding, reraise
from trainer.errors import ImpastoError

if TYPE_CHECKING:  # pydantic, numpy: a worker loads them once there are images
    from app.core.disk.scanner import NotesRead, OrphanFiles
    from app.core.health.findings import HealthFinding
    from app.core.health.judging import Judge

# Seconds that the owner's thread judges images before it handles events again.
_BATCH_SECONDS = 0.004
# Up to this many images that change together are judged immediately.
_MAX_IMMEDIATE = 20
# Captions sent to be counted at once: 5 ms of the owner's thread, 50 ms of a worker.
_TOKEN_BATCH = 500
_IGNORED = frozenset({"rating"})
_FILE_FACTS = frozenset({"file", "mask"})
# Reported for an image whose file is back. An inspection may have found the file missing, and the known facts were
# cleared, so it is inspected again.
_RETURN_FACTS = frozenset({"problem", "inspection"})
# With fewer tagged images every tag is rare, so none is reported.
_MIN_TAGGED = 10
# Folders are unbalanced when an epoch shows another one more than this many times as often.
_UNBALANCED_RATIO = 5
# A tag of more words is a sentence, and a sentence that appears once is not suspicious.
_MAX_TAG_WORDS = 4
_TOP_COUNT = 40


class HealthProgress(NamedTuple):
    """Numbers of images still to be judged, images still to be inspected, and all images."""

    judging: int
    inspecting: int
    total: int


class Tags(NamedTuple):
    """The most frequent tags with their counts, and the ids of images with a tag that no other image has."""

    top: list[tuple[str, int]]
    rare: frozenset[int]


class Health:
    """Findings and chart data of all open datasets. Use it only on the thread that owns the library."""

    def __init__(
        self, library: Library, index: TagIndex, tasks: Tasks, post: Post, aim: JudgingTarget | None = None
    ) -> None:
        self.findings: Emitter[tuple[HealthFinding, ...]] = Emitter()
        self.progress: Emitter[HealthProgress] = Emitter()
        self.charts: Emitter[None] = Emitter()
        """Emitted when the chart data has changed."""
        self.target = aim or JudgingTarget()
        self.image_index = ImageIndex()
        """Index of images by finding ("mark") and by chart values ("bucket", "tokens", "cell")."""
        self.tags = Tags([], frozenset())
        self.current_findings: tuple[HealthFinding, ...] = ()
        """Findings of the last report."""
        self._library, self._index, self._tasks, self._post = library, index, tasks, post
        self._inspector = Inspector(library, post, self._on_inspected, self._schedule_report)
        self._tokens = TokenCounts(tasks)
        self._judge: Judge | None = None
        self._loading = self._report_scheduled = self._judging_scheduled = self._counting = False
        self._tags_stale = True
        self._waiting: dict[int, None] = {}
        self._seen: dict[int, tuple[str, ...]] = {}
        self._contents, self._stems = SharedIndex(), SharedIndex()
        self._orphans: dict[Folder, Mapping[str, tuple[str, ...]]] = {}
        self._note_errors: dict[Folder, ImpastoError] = {}
        self._near: dict[int, set[int]] = {}
        self._near_marked: set[int] = set()
        library.altered.connect(self._on_altered)
        index.changed.connect(lambda _: self._mark_tags_stale())
        self._tokens.counted.connect(lambda _: self._request_token_counts())

    @property
    def judge(self) -> Judge | None:
        """Return the judge in use; None until a worker has loaded it."""
        return self._judge

    def current_progress(self) -> HealthProgress:
        """Return the current progress."""
        judging = len(self._waiting) + (self._tokens.pending if self._judge else 0)
        return HealthProgress(judging, self._inspector.pending, len(self._library.images))

    def tagged(self, tag: str) -> Set[int]:
        """Return the ids of the images with a tag."""
        return self._index.images_with(tag)

    def images_by_finding(self) -> Mapping[str, Set[int]]:
        """Return the image ids of each finding, by its name in `problem:` queries. Do not modify these live sets."""
        return {finding.query.removeprefix("problem:"): finding.ids for finding in self.current_findings if finding.ids}

    def set_target(self, aim: JudgingTarget) -> None:
        """Set the training settings to judge by and, if they changed, judge all images again."""
        if aim != self.target:
            self.target, self._judge = aim, None
            self._waiting = dict.fromkeys(self._library.images)
            self._load()

    def refresh(self) -> None:
        """Count rare and frequent tags again if captions changed.

        This takes a worker half a second for 100,000 images, so call it at most every two seconds.
        """
        if self._counting or not self._tags_stale or self._index.pending:
            return
        self._counting, self._tags_stale = True, False
        # Two lists of existing objects: pairs would allocate 100,000 new tuples on the owner's thread.
        left_out = frozenset(self.image_index.under("mark", "image.excluded"))
        ids = [number for number in self._library.images if number not in left_out]
        rows = list(map(self._index.row, ids))
        self._tasks.run(lambda: count_tags(zip(ids, rows, strict=True)), self._on_tags_counted, reraise)

    def start_inspection(self) -> None:
        """Start inspecting files, or retry after a failure.

        Call it only after a dataset has been listed: showing its images is more urgent.
        """
        self._inspector.start()
        self._schedule_report()

    def inspect_again(self, ids: Iterable[int]) -> None:
        """Inspect these images again: their files changed in a way that the scanner cannot detect."""
        self._inspector.request(ids)

    def retry_missing(self) -> None:
        """Inspect files that were missing at their inspection but exist again; call it after each scan.

        A file that was missing only between two scans is not reported as changed by any scan.
        """
        self._inspector.request(filter(self._is_unseen, self._inspector.take_missing()))

    def set_orphan_files(self, strays: OrphanFiles) -> None:
        """Replace the orphan files (files without an image) that are reported for a folder."""
        if strays.names:
            self._orphans[strays.folder] = strays.names
        else:
            self._orphans.pop(strays.folder, None)
        self._schedule_report()

    def set_notes_error(self, notes: NotesRead) -> None:
        """Set or clear the error of a folder whose notes cannot be read; training refuses such a folder."""
        if notes.error:
            self._note_errors[notes.folder] = notes.error
        else:
            self._note_errors.pop(notes.folder, None)
        self._schedule_report()

    def forget_dataset(self, root: Path) -> None:
        """Forget the orphan files and note errors of a dataset that was closed."""
        self._orphans = {folder: names for folder, names in self._orphans.items() if folder.root != root}
        self._note_errors = {folder: why for folder, why in self._note_errors.items() if folder.root != root}
        self._schedule_report()

    def close(self) -> None:
        """Stop the background work."""
        self._waiting.clear()
        self._inspector.close()

    # Judging

    def _on_altered(self, altered: LibraryChange) -> None:
        for number in altered.removed:
            self._forget(number)
        ids = altered.added if altered.what <= _IGNORED else altered.added | altered.altered
        if altered.added or altered.what & _FILE_FACTS:
            self._inspector.request(ids if altered.what & _FILE_FACTS else altered.added)
        if altered.what & _RETURN_FACTS:
            self._inspector.request(filter(self._is_unseen, altered.altered))
        if "caption" in altered.what:
            self._forget_encodings(altered.altered)
        if altered.what & {"excluded", "folder"} or altered.removed or altered.added:
            self._mark_tags_stale()
        if self._judge and len(ids) <= _MAX_IMMEDIATE and not self._waiting:
            for number in ids:
                self._judge_image(self._judge, number)
            self._request_token_counts()
        else:
            self._waiting.update(dict.fromkeys(ids))
            self._continue_judging()
        if ids or altered.removed:
            self._schedule_report()

    def _is_unseen(self, number: int) -> bool:
        """Return whether an image is in the library but has not been inspected."""
        image = self._library.images.get(number)
        return image is not None and image.content is None and not image.problem

    def _forget(self, number: int) -> None:
        self._waiting.pop(number, None)
        self._seen.pop(number, None)
        self._contents.put(number, None)
        self._stems.put(number, None)
        self.image_index.put(number, ())
        self._unlink_near(number)

    def _forget_encodings(self, ids: Iterable[int]) -> None:
        """Drop the encoding findings of images whose captions changed, because the app always writes UTF-8."""
        for number in ids:
            codes = self._seen.get(number, ())
            if any(code.startswith("caption.") for code in codes):
                self._seen[number] = tuple(code for code in codes if not code.startswith("caption."))

    def _load(self) -> None:
        """Load the judge on a worker, then judge the waiting images."""
        if self._loading:
            return
        self._loading = True
        aim = self.target

        def load() -> Judge:
            from app.core.health import findings, judging  # noqa: F401 (imported here to keep the load off the owner's thread)

            return judging.Judge(aim.recipe(), self._tokens.count, aim.lines)

        self._tasks.run(load, lambda judge: self._on_judge_loaded(aim, judge), reraise)

    def _on_judge_loaded(self, aim: JudgingTarget, judge: Judge) -> None:
        self._loading = False
        if aim == self.target:
            self._judge = judge
            self._continue_judging()
        else:
            self._load()

    def _continue_judging(self) -> None:
        if not self._waiting:
            return
        if self._judge is None:
            self._load()
        elif not self._judging_scheduled:
            self._judging_scheduled = True
            self._post(self._judge_batch)

    def _judge_batch(self) -> None:
        """Judge waiting images for a few milliseconds, then return to the event loop before the next batch."""
        self._judging_scheduled = False
        end = time.perf_counter() + _BATCH_SECONDS
        while self._judge and self._waiting and time.perf_counter() < end:
            self._judge_image(self._judge, self._waiting.popitem()[0])
        if not self._waiting:
            self._request_token_counts()
        self._schedule_report()
        self._continue_judging()

    def _judge_image(self, judge: Judge, number: int) -> None:
        image = self._library.images.get(number)
        if image is None:
            return
        self.image_index.put(number, judge.keys(image, self._seen.get(number, ())))
        trained = not image.excluded and not image.problem
        self._contents.put(number, image.content if trained else None)
        stem = image.name.rpartition(".")[0]
        self._stems.put(number, f"{id(image.folder)}/{stem}" if trained else None)
        self._mark_near(number)
        for other in self._near.get(number, ()):
            self._mark_near(other)

    def _request_token_counts(self) -> None:
        """Request missing token counts of captions, and rejudge images whose counts have arrived."""
        judge, images = self._judge, self._library.images
        waiting = self.image_index.under("uncounted", "tokens")
        if judge is None or not waiting or self._tokens.pending:
            return
        texts: dict[str, None] = {}
        for number in islice(waiting, _TOKEN_BATCH):
            uncounted = [text for text in judge.captions(images[number]) if self._tokens.count(text) is None]
            if uncounted:
                texts.update(dict.fromkeys(uncounted))
            else:
                self._waiting[number] = None
        if texts:
            self._tokens.request(texts)
        self._continue_judging()

    # Inspection results

    def _on_inspected(self, found: InspectionBatch) -> None:
        facts: dict[int, dict[str, object]] = {}
        kinds: set[str] = {"inspection"}
        for seen in found.seen:
            self._seen[seen.image] = seen.codes
            facts[seen.image] = self._facts(seen, kinds)
            self._unlink_near(seen.image)
        self._link_near(found.near, {number: known["content"] for number, known in facts.items()})
        self._library.set_facts(facts, *kinds)  # type: ignore[arg-type]  # built from Literals
        self._schedule_report()

    def _facts(self, seen: InspectedImage, kinds: set[str]) -> dict[str, object]:
        image = self._library.images[seen.image]
        facts: dict[str, object] = {"content": seen.content, "fingerprint": seen.fingerprint}
        if seen.width and (image.width, image.height) != (seen.width, seen.height):
            facts |= {"width": seen.width, "height": seen.height}
            kinds.add("size")
        if seen.problem:
            facts["problem"] = seen.problem
            kinds.add("problem")
        return facts

    def _link_near(self, near: Iterable[tuple[int, int]], learned: Mapping[int, object]) -> None:
        """Record pairs of near duplicates. Skip exact copies: they are found by content, and there may be thousands."""
        images = self._library.images
        for first, second in near:
            if first in images and second in images:
                contents = [learned.get(number, images[number].content) for number in (first, second)]
                if contents[0] != contents[1]:
                    self._near.setdefault(first, set()).add(second)
                    self._near.setdefault(second, set()).add(first)

    def _unlink_near(self, number: int) -> None:
        """Remove all near-duplicate pairs of an image."""
        for other in self._near.pop(number, ()):
            self._near[other].discard(number)
            self._mark_near(other)
        self._near_marked.discard(number)

    def _mark_near(self, number: int) -> None:
        if next(self._near_to(number, self._near.get(number, ())), None) is not None:
            self._near_marked.add(number)
        else:
            self._near_marked.discard(number)

    def _near_to(self, number: int, others: Iterable[int]) -> Iterator[int]:
        """Yield the `others` that are neither excluded nor exact copies of this image; nothing if it is excluded."""
        images = self._library.images
        image = images.get(number)
        if image is None or image.excluded:
            return
        for other in map(images.get, others):
            if other and not other.excluded and other.content != image.content:
                yield other.id

    # Tags

    def _mark_tags_stale(self) -> None:
        self._tags_stale = True

    def _on_tags_counted(self, tags: Tags) -> None:
        self._counting = False
        self.tags = tags
        self._schedule_report()

    # Reporting

    def _schedule_report(self) -> None:
        """Schedule one report for all changes made during the current event."""
        if not self._report_scheduled:
            self._report_scheduled = True
            self._post(self._report)

    def _report(self) -> None:
        self._report_scheduled = False
        if self._judge is not None:
            self.current_findings = self._findings()
            self.findings.emit(self.current_findings)
            self.charts.emit(None)
        self.progress.emit(self.current_progress())

    def _findings(self) -> tuple[HealthFinding, ...]:
        from app.core.health.findings import (
            MAX_LISTED,
            inspection_failed_finding,
            make_finding,
            notes_finding,
            orphan_files_finding,
            sort_findings,
        )

        sets: dict[str, Set[int]] = {str(code): ids for code, ids in self.image_index.all("mark").items()}
        sets["duplicate.exact"] = self._contents.images
        sets["duplicate.near"] = self._near_marked
        sets["image.same_stem"] = self._stems.images
        sets["tag.rare"] = self.tags.rare
        sets["folder.unbalanced"] = self._unbalanced()
        sets["bucket.lonely"] = self._underfilled_buckets()
        if not self.image_index.under("mask", "with"):
            sets.pop("mask.missing", None)  # a dataset without any mask is not meant to have masks
        findings = [
            make_finding(code, ids, self._fix(code, ids), self._only_image(ids)) for code, ids in sets.items() if ids
        ]
        if fault := self._inspector.fault:
            findings.append(inspection_failed_finding(fault))
        findings += map(notes_finding, self._note_errors.values())
        for code in sorted({code for names in self._orphans.values() for code in names}):
            lists = [(folder.path, names[code]) for folder, names in self._orphans.items() if code in names]
            first = list(islice((path / name for path, names in lists for name in names), MAX_LISTED))
            findings.append(orphan_files_finding(code, sum(len(names) for _, names in lists), first))
        return sort_findings(findings)

    def _only_image(self, ids: Set[int]) -> LibraryImage | None:
        """Return the image if `ids` has exactly one, else None."""
        return self._library.images[next(iter(ids))] if len(ids) == 1 else None

    def _unbalanced(self) -> frozenset[int]:
        """Return the ids of images in folders with far fewer samples per epoch than the largest folder."""
        folders = [(folder, ids) for folder, ids in self.image_index.all("folder").items() if not folder.regularization]  # type: ignore[attr-defined]
        shown = [(len(ids) * (folder.repeats or 1), ids) for folder, ids in folders]  # type: ignore[attr-defined]
        most = max((count for count, _ in shown), default=0)
        return frozenset().union(*(ids for count, ids in shown if count * _UNBALANCED_RATIO < most))

    def _underfilled_buckets(self) -> frozenset[int]:
        """Return the ids of images in buckets with less than a batch of samples; none if there is only one bucket."""
        shapes = self.image_index.all("shape")
        assert self._judge is not None
        batch = self._judge.recipe.effective_batch
        few = [ids for ids in shapes.values() if len(ids) < batch and self._samples(ids) < batch]
        return frozenset().union(*few) if len(shapes) > 1 else frozenset()

    def _samples(self, ids: Iterable[int]) -> int:
        return sum(self._library.images[number].folder.repeats or 1 for number in ids)

    # Fixes

    def _fix(self, code: str, ids: Set[int]) -> tuple[str, Callable[[], Edit]] | None:
        """Return the title and the edit factory of a fix, or None.

        The factory reads `ids` when it is called, and thus uses the images affected at that time.
        """
        from app.core.edits.bulk import exclude
        from app.core.health import findings as fixes

        def affected() -> list[LibraryImage]:
            images = self._library.images
            return [image for number in sorted(ids) if (image := images.get(number))]

        match code:
            case "image.unusable" | "image.tiny" | "image.small":
                return "Exclude them", lambda: exclude(affected(), True)
            case "image.excluded":
                return "Include them", lambda: exclude(affected(), False)
            case "duplicate.exact":
                return "Keep the best image of each group", lambda: fixes.keep_best(
                    self._images(self._contents.groups())
                )
            case "duplicate.near":
                return "Keep the best image of each group", lambda: fixes.keep_best(self._images(self._near_groups()))
            case "trigger.absent":
                return "Put the trigger word first", lambda: fixes.put_trigger_first(affected(), self.target.lines)
            case "tag.one_letter":
                return "Remove these tags", lambda: fixes.remove_single_letters(affected(), self.target.lines)
        return None

    def _near_groups(self) -> list[list[int]]:
        from app.core.health.findings import connected

        near = {number: tuple(self._near.get(number, ())) for number in tuple(self._near_marked)}
        return connected({number: list(self._near_to(number, others)) for number, others in near.items()})

    def _images(self, groups: Iterable[Iterable[int]]) -> list[list[LibraryImage]]:
        images = self._library.images
        return [[images[number] for number in group if number in images] for group in groups]


def count_tags(rows: Iterable[tuple[int, Row]]) -> Tags:
    """Return the frequent tags and the ids of images with unique tags. Runs on a worker; pass only trained images."""
    rows = list(rows)
    counts = Counter(tag for _, row in iterate_yielding(rows) for tag in row)
    unique = {tag for tag, count in counts.items() if count == 1 and tag.count(" ") < _MAX_TAG_WORDS}
    has_enough = sum(1 for _, row in rows if row) >= _MIN_TAGGED
    rare = frozenset(number for number, row in iterate_yielding(rows) if has_enough and not unique.isdisjoint(row))
    top = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:_TOP_COUNT]
    return Tags(top, rare)
