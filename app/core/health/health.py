"""Knows at any moment what is wrong or doubtful with the open datasets, and what the charts show.

One picture's judgement takes some microseconds and is renewed when the picture changes, so an edit of one caption costs
the same however many pictures there are. When very many change, they are judged in slices between the user's events.
Files are looked at by worker processes (inspector.py); tags that stand but once are counted by a worker on `refresh`.
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
from app.core.health.groups import Files, JudgingTarget, SharedIndex
from app.core.health.inspector import InspectedImage, Inspector, Slice
from app.core.library import Altered, Folder, Library, LibraryImage
from app.core.query.tokens import TokenCounts
from app.core.tags.index import Row, TagIndex
from app.core.tasks import Post, Tasks, in_turns, raise_again
from trainer.errors import ImpastoError

if TYPE_CHECKING:  # pydantic, numpy: a worker loads them once there are pictures
    from app.core.disk.scanner import NotesRead, OrphanFiles
    from app.core.health.findings import HealthFinding
    from app.core.health.judging import Judge

# How long the owner's thread judges pictures in one go, in seconds; what changes at once up to so many is judged there.
_PORTION = 0.004
_AT_ONCE = 20
# Captions handed over to be counted at once: 5 ms of the owner's thread, 50 of a worker.
_TEXTS = 500
_INDIFFERENT = frozenset({"rating"})
_OF_FILES = frozenset({"file", "mask"})
# Told of a picture that is back: a look may have found its file gone, and what an earlier one told is forgotten.
_OF_RETURN = frozenset({"problem", "inspection"})
# Below this number of pictures every tag is rare; above this ratio of showings folders count as unbalanced.
_ENOUGH = 10
_UNBALANCED = 5
# A tag of more words than this is a sentence: that it stands once says nothing.
_WORDS = 4
_TOP = 40


class HealthProgress(NamedTuple):
    """How many pictures are still to be judged, and how many files still to be looked at."""

    judging: int
    inspecting: int
    total: int


class Tags(NamedTuple):
    """The most frequent tags with their numbers of pictures, and the pictures with a tag of their own."""

    top: list[tuple[str, int]]
    rare: frozenset[int]


class Health:
    """Belongs to the thread that owns the library."""

    def __init__(
        self, library: Library, index: TagIndex, tasks: Tasks, post: Post, aim: JudgingTarget | None = None
    ) -> None:
        self.findings: Emitter[tuple[HealthFinding, ...]] = Emitter()
        self.progress: Emitter[HealthProgress] = Emitter()
        self.charts: Emitter[None] = Emitter()
        """What the charts show is different now."""
        self.aim = aim or JudgingTarget()
        self.files = Files()
        """Pictures by what the charts show: kinds "bucket", "tokens" and "cell"."""
        self.tags = Tags([], frozenset())
        self.now: tuple[HealthFinding, ...] = ()
        """The findings of now."""
        self._library, self._index, self._tasks, self._post = library, index, tasks, post
        self._inspector = Inspector(library, post, self._have, self._tell_soon)
        self._tokens = TokenCounts(tasks)
        self._judge: Judge | None = None
        self._loading = self._soon = self._going = self._counting = False
        self._tags_stale = True
        self._waiting: dict[int, None] = {}
        self._seen: dict[int, tuple[str, ...]] = {}
        self._contents, self._stems = SharedIndex(), SharedIndex()
        self._strays: dict[Folder, Mapping[str, tuple[str, ...]]] = {}
        self._unread_notes: dict[Folder, ImpastoError] = {}
        self._near: dict[int, set[int]] = {}
        self._near_marked: set[int] = set()
        library.altered.connect(self._take)
        index.changed.connect(lambda _: self._note_tags())
        self._tokens.counted.connect(lambda _: self._want_uncounted())

    @property
    def judge(self) -> Judge | None:
        """Return the yardsticks in force, None until a worker has loaded them."""
        return self._judge

    def state(self) -> HealthProgress:
        """Return how far it has come."""
        judging = len(self._waiting) + (self._tokens.pending if self._judge else 0)
        return HealthProgress(judging, self._inspector.pending, len(self._library.images))

    def tagged(self, tag: str) -> Set[int]:
        """Return the pictures with a tag."""
        return self._index.images_with(tag)

    def marked(self) -> Mapping[str, Set[int]]:
        """Return the pictures of each finding by what `problem:` asks for; the sets live and are not to be changed."""
        return {finding.query.removeprefix("problem:"): finding.ids for finding in self.now if finding.ids}

    def aim_at(self, aim: JudgingTarget) -> None:
        """Judge all pictures for another training."""
        if aim != self.aim:
            self.aim, self._judge = aim, None
            self._waiting = dict.fromkeys(self._library.images)
            self._load()

    def refresh(self) -> None:
        """Count rare and frequent tags again if captions changed; for every other second, and half a second's work."""
        if self._counting or not self._tags_stale or self._index.pending:
            return
        self._counting, self._tags_stale = True, False
        # Two lists of what is there already: pairs would be a hundred thousand new objects.
        left_out = frozenset(self.files.under("mark", "picture.excluded"))
        ids = [number for number in self._library.images if number not in left_out]
        rows = list(map(self._index.row, ids))
        self._tasks.run(lambda: count_tags(zip(ids, rows, strict=True)), self._counted, raise_again)

    def begin(self) -> None:
        """Look at files from now on, again where that failed: once a dataset is listed, as its pictures come first."""
        self._inspector.begin()
        self._tell_soon()

    def look_again(self, ids: Iterable[int]) -> None:
        """Look at the files of these pictures once more: they were changed without a sign of it."""
        self._inspector.want(ids)

    def look_for_gone(self) -> None:
        """Look again at files that were away for a moment which no look at the disk noticed: after each of those."""
        self._inspector.want(filter(self._is_unseen, self._inspector.take_gone()))

    def take_strays(self, strays: OrphanFiles) -> None:
        """Tell from now on of these files of a folder that have no picture, and of no others there."""
        if strays.names:
            self._strays[strays.folder] = strays.names
        else:
            self._strays.pop(strays.folder, None)
        self._tell_soon()

    def take_notes(self, notes: NotesRead) -> None:
        """Take in whether the notes of a folder can be read: training refuses a folder whose notes cannot."""
        if notes.error:
            self._unread_notes[notes.folder] = notes.error
        else:
            self._unread_notes.pop(notes.folder, None)
        self._tell_soon()

    def drop_strays(self, root: Path) -> None:
        """Tell no more of the files of a dataset that was closed."""
        self._strays = {folder: names for folder, names in self._strays.items() if folder.root != root}
        self._unread_notes = {folder: why for folder, why in self._unread_notes.items() if folder.root != root}
        self._tell_soon()

    def close(self) -> None:
        """End what runs behind."""
        self._waiting.clear()
        self._inspector.close()

    # Taking in

    def _take(self, altered: Altered) -> None:
        for number in altered.removed:
            self._forget(number)
        ids = altered.added if altered.what <= _INDIFFERENT else altered.added | altered.altered
        if altered.added or altered.what & _OF_FILES:
            self._inspector.want(ids if altered.what & _OF_FILES else altered.added)
        if altered.what & _OF_RETURN:
            self._inspector.want(filter(self._is_unseen, altered.altered))
        if "caption" in altered.what:
            self._forget_encodings(altered.altered)
        if altered.what & {"excluded", "folder"} or altered.removed or altered.added:
            self._note_tags()
        if self._judge and len(ids) <= _AT_ONCE and not self._waiting:
            for number in ids:
                self._enter(self._judge, number)
            self._want_uncounted()
        else:
            self._waiting.update(dict.fromkeys(ids))
            self._go_on()
        if ids or altered.removed:
            self._tell_soon()

    def _is_unseen(self, number: int) -> bool:
        """Tell whether nothing is known of the file of a picture that is there."""
        image = self._library.images.get(number)
        return image is not None and image.content is None and not image.problem

    def _forget(self, number: int) -> None:
        self._waiting.pop(number, None)
        self._seen.pop(number, None)
        self._contents.put(number, None)
        self._stems.put(number, None)
        self.files.put(number, ())
        self._part(number)

    def _forget_encodings(self, ids: Iterable[int]) -> None:
        """Whoever writes a caption here writes UTF-8."""
        for number in ids:
            codes = self._seen.get(number, ())
            if any(code.startswith("caption.") for code in codes):
                self._seen[number] = tuple(code for code in codes if not code.startswith("caption."))

    def _load(self) -> None:
        """Let a worker load what pictures are judged by, and then judge."""
        if self._loading:
            return
        self._loading = True
        aim = self.aim

        def load() -> Judge:
            from app.core.health import findings, judging  # noqa: F401 (so that the owner's thread need not load it)

            return judging.Judge(aim.recipe(), self._tokens.of, aim.lines)

        self._tasks.run(load, lambda judge: self._loaded(aim, judge), raise_again)

    def _loaded(self, aim: JudgingTarget, judge: Judge) -> None:
        self._loading = False
        if aim == self.aim:
            self._judge = judge
            self._go_on()
        else:
            self._load()

    def _go_on(self) -> None:
        if not self._waiting:
            return
        if self._judge is None:
            self._load()
        elif not self._going:
            self._going = True
            self._post(self._portion)

    def _portion(self) -> None:
        """Judge some of the waiting pictures, and let the user have a word before the next."""
        self._going = False
        end = time.perf_counter() + _PORTION
        while self._judge and self._waiting and time.perf_counter() < end:
            self._enter(self._judge, self._waiting.popitem()[0])
        if not self._waiting:
            self._want_uncounted()
        self._tell_soon()
        self._go_on()

    def _enter(self, judge: Judge, number: int) -> None:
        image = self._library.images.get(number)
        if image is None:
            return
        self.files.put(number, judge.keys(image, self._seen.get(number, ())))
        trained = not image.excluded and not image.problem
        self._contents.put(number, image.content if trained else None)
        stem = image.name.rpartition(".")[0]
        self._stems.put(number, f"{id(image.folder)}/{stem}" if trained else None)
        self._mark_near(number)
        for other in self._near.get(number, ()):
            self._mark_near(other)

    def _want_uncounted(self) -> None:
        """Have the tokens of captions counted that are not known; judge again those that are by now."""
        judge, images = self._judge, self._library.images
        waiting = self.files.under("uncounted", "tokens")
        if judge is None or not waiting or self._tokens.pending:
            return
        texts: dict[str, None] = {}
        for number in islice(waiting, _TEXTS):
            uncounted = [text for text in judge.captions(images[number]) if self._tokens.of(text) is None]
            if uncounted:
                texts.update(dict.fromkeys(uncounted))
            else:
                self._waiting[number] = None
        if texts:
            self._tokens.want(texts)
        self._go_on()

    # What the inspector saw

    def _have(self, found: Slice) -> None:
        facts: dict[int, dict[str, object]] = {}
        kinds: set[str] = {"inspection"}
        for seen in found.seen:
            self._seen[seen.image] = seen.codes
            facts[seen.image] = self._facts(seen, kinds)
            self._part(seen.image)
        self._link(found.near, {number: known["content"] for number, known in facts.items()})
        self._library.learn(facts, *kinds)  # type: ignore[arg-type]  # built from Literals
        self._tell_soon()

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

    def _link(self, near: Iterable[tuple[int, int]], learned: Mapping[int, object]) -> None:
        """Note pairs that are nearly the same; not those of the same bytes, of which there may be thousands."""
        images = self._library.images
        for first, second in near:
            if first in images and second in images:
                contents = [learned.get(one, images[one].content) for one in (first, second)]
                if contents[0] != contents[1]:
                    self._near.setdefault(first, set()).add(second)
                    self._near.setdefault(second, set()).add(first)

    def _part(self, number: int) -> None:
        """Take a picture from those that are nearly the same as others."""
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
        """Yield which of these are trained pictures of other bytes, for a trained picture."""
        images = self._library.images
        one = images.get(number)
        if one is None or one.excluded:
            return
        for other in map(images.get, others):
            if other and not other.excluded and other.content != one.content:
                yield other.id

    # Tags

    def _note_tags(self) -> None:
        self._tags_stale = True

    def _counted(self, tags: Tags) -> None:
        self._counting = False
        self.tags = tags
        self._tell_soon()

    # Telling

    def _tell_soon(self) -> None:
        """Tell once for all that changes in one go."""
        if not self._soon:
            self._soon = True
            self._post(self._tell)

    def _tell(self) -> None:
        self._soon = False
        if self._judge is not None:
            self.now = self._findings()
            self.findings.emit(self.now)
            self.charts.emit(None)
        self.progress.emit(self.state())

    def _findings(self) -> tuple[HealthFinding, ...]:
        from app.core.health.findings import LISTED, found, in_order, of_files, of_notes, unseen

        sets: dict[str, Set[int]] = {str(code): ids for code, ids in self.files.all("mark").items()}
        sets["duplicate.exact"] = self._contents.images
        sets["duplicate.near"] = self._near_marked
        sets["picture.same_stem"] = self._stems.images
        sets["tag.rare"] = self.tags.rare
        sets["folder.unbalanced"] = self._unbalanced()
        sets["bucket.lonely"] = self._lonely()
        if not self.files.under("mask", "with"):
            sets.pop("mask.missing", None)  # nobody paints masks here
        told = [found(code, ids, self._fix(code, ids), self._alone(ids)) for code, ids in sets.items() if ids]
        if fault := self._inspector.fault:
            told.append(unseen(fault))
        told += map(of_notes, self._unread_notes.values())
        for code in sorted({code for names in self._strays.values() for code in names}):
            lists = [(folder.path, names[code]) for folder, names in self._strays.items() if code in names]
            first = list(islice((path / name for path, names in lists for name in names), LISTED))
            told.append(of_files(code, sum(len(names) for _, names in lists), first))
        return in_order(told)

    def _alone(self, ids: Set[int]) -> LibraryImage | None:
        """Return the only picture of a finding."""
        return self._library.images[next(iter(ids))] if len(ids) == 1 else None

    def _unbalanced(self) -> frozenset[int]:
        """Return the pictures of folders that an epoch shows far less often than the one it shows most."""
        folders = [(folder, ids) for folder, ids in self.files.all("folder").items() if not folder.regularization]  # type: ignore[attr-defined]
        shown = [(len(ids) * (folder.repeats or 1), ids) for folder, ids in folders]  # type: ignore[attr-defined]
        most = max((count for count, _ in shown), default=0)
        return frozenset().union(*(ids for count, ids in shown if count * _UNBALANCED < most))

    def _lonely(self) -> frozenset[int]:
        """Return the pictures of shapes that an epoch shows more seldom than fills a batch, where there are several."""
        shapes = self.files.all("shape")
        assert self._judge is not None
        batch = self._judge.recipe.effective_batch
        few = [ids for ids in shapes.values() if len(ids) < batch and self._samples(ids) < batch]
        return frozenset().union(*few) if len(shapes) > 1 else frozenset()

    def _samples(self, ids: Iterable[int]) -> int:
        return sum(self._library.images[number].folder.repeats or 1 for number in ids)

    # Mending

    def _fix(self, code: str, ids: Set[int]) -> tuple[str, Callable[[], Edit]] | None:
        """Return a title and what works out the edit; the pictures are those of the moment at which it is asked."""
        from app.core.edits.bulk import exclude
        from app.core.health import findings as fixes

        def chosen() -> list[LibraryImage]:
            images = self._library.images
            return [image for number in sorted(ids) if (image := images.get(number))]

        match code:
            case "picture.unusable" | "picture.tiny" | "picture.small":
                return "Exclude them", lambda: exclude(chosen(), True)
            case "picture.excluded":
                return "Include them", lambda: exclude(chosen(), False)
            case "duplicate.exact":
                return "Keep the best of each", lambda: fixes.keep_best(self._images(self._contents.groups()))
            case "duplicate.near":
                return "Keep the best of each", lambda: fixes.keep_best(self._images(self._near_groups()))
            case "trigger.absent":
                return "Put the trigger first", lambda: fixes.put_trigger_first(chosen(), self.aim.lines)
            case "tag.one_letter":
                return "Remove these tags", lambda: fixes.remove_single_letters(chosen(), self.aim.lines)
        return None

    def _near_groups(self) -> list[list[int]]:
        from app.core.health.findings import connected

        near = {number: tuple(self._near.get(number, ())) for number in tuple(self._near_marked)}
        return connected({number: list(self._near_to(number, others)) for number, others in near.items()})

    def _images(self, groups: Iterable[Iterable[int]]) -> list[list[LibraryImage]]:
        images = self._library.images
        return [[images[number] for number in group if number in images] for group in groups]


def count_tags(rows: Iterable[tuple[int, Row]]) -> Tags:
    """Return the frequent tags and the pictures with rare ones, of the pictures that are trained; for a worker."""
    rows = list(rows)
    counts = Counter(tag for _, row in in_turns(rows) for tag in row)
    alone = {tag for tag, count in counts.items() if count == 1 and tag.count(" ") < _WORDS}
    enough = sum(1 for _, row in rows if row) >= _ENOUGH
    rare = frozenset(number for number, row in in_turns(rows) if enough and not alone.isdisjoint(row))
    top = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:_TOP]
    return Tags(top, rare)
