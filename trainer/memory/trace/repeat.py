"""Trace a UNet with few transformer blocks, and repeat the events of one to get the trace of the whole UNet.

SDXL has 70 transformer blocks, up to ten in a row that differ only in their number. Of each row, three are traced: the
first, one that stands for all in between, and the last. This halves the time and changes nothing: if the blocks differ
in more than their number, an error is raised, and the whole UNet is traced. Does not require torch.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from trainer.memory.trace.memory_trace import MemoryTrace, Storage
from trainer.memory.trace.workload import Workload

# Blocks that are traced of each transformer: the first, the one to repeat, and the last.
TRACED = 3
REPEATED = 1
LAST = TRACED - 1
# Instead of the number of a group or block, for what is outside of repeated blocks.
OUTSIDE = -1
# In module paths and parameter paths, and (with underscores) in the keys of an adapter's weights.
_PLACE = re.compile(r"^unet\.((down_blocks\.\d+|mid_block|up_blocks\.\d+)\.attentions\.\d+)\.transformer_blocks\.(\d+)")
_BLOCK = re.compile(r"(transformer_blocks[._])\d+")


class NotRepeatedError(Exception):
    """Blocks differ in more than their number, so the whole UNet has to be traced."""


class Place(NamedTuple):
    """Transformer block: the path of its transformer within the UNet, and its number there."""

    transformer: str
    number: int


class _Identity(NamedTuple):
    """Storage of a trace, in a way that can be moved to another transformer block."""

    run: int
    """Number of the group of blocks in which it is allocated, or `OUTSIDE`."""
    place: Place | None
    which: Hashable
    """In a group: what is allocated, and how often the block has allocated that before. Otherwise a unique number, or
    the name that the storage would have in block 0."""

    def moved(self, by: int) -> _Identity:
        """Return the same storage of a later block."""
        assert self.place is not None
        return self._replace(place=self.place._replace(number=self.place.number + by))


Event = tuple[bool, _Identity]
"""Whether it is an allocation, and the storage."""


@dataclass(frozen=True)
class Repetition:
    """The transformers of which only `TRACED` blocks are traced, with the number of their blocks."""

    workload: Workload
    """The workload with a UNet of few transformer blocks."""
    blocks: Mapping[str, int]
    """Number of transformer blocks by block of the UNet, such as "down_blocks.2", where they are more than `TRACED`."""
    _places: dict[str, Place | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    def place(self, module: str) -> Place | None:
        """Return the transformer block of a module if its transformer is repeated; else None."""
        if module not in self._places:
            found = _PLACE.match(module)
            inside = found is not None and found.group(2) in self.blocks
            self._places[module] = Place(found.group(1), int(found.group(3))) if found and inside else None
        return self._places[module]

    def count(self, transformer: str) -> int:
        """Return the number of blocks of a transformer."""
        return self.blocks[transformer.partition(".attentions")[0]]

    def times(self, module: str) -> int:
        """Return how many times an operation of a module is executed in the whole UNet."""
        place = self.place(module)
        return 1 if place is None or place.number != REPEATED else self.count(place.transformer) - LAST

    def extended(self, trace: MemoryTrace) -> MemoryTrace:
        """Return the trace of the whole UNet; its work must have been counted by `times`.

        Raises NotRepeatedError if the traced blocks differ in more than their number.
        """
        return _Extension(self, trace).trace()

    def keys(self, modules: Mapping[str, str]) -> Iterator[tuple[str, str, int]]:
        """Yield the keys of the whole adapter's weights in order, each with the traced key and the block it is in.

        ``modules`` contains the modules of the traced keys. The block is its number if it is repeated, else `OUTSIDE`.
        Raises NotRepeatedError if the weights are not in the order of the blocks.
        """
        places = {key: self.place(module) for key, module in modules.items()}

        def transformer(key: str) -> str | None:
            place = places[key]
            return place and place.transformer

        for name, group in groupby(modules, transformer):
            if name is None:
                yield from ((key, key, OUTSIDE) for key in group)
                continue
            blocks = [list(block) for _, block in groupby(group, places.__getitem__)]
            if len(blocks) != TRACED:
                raise NotRepeatedError
            whole = [blocks[0], *[blocks[REPEATED]] * (self.count(name) - LAST), blocks[LAST]]
            for number, traced in enumerate(whole):
                yield from ((at_block(key, number), key, number) for key in traced)


def repetition(workload: Workload) -> Repetition | None:
    """Return what to trace of a workload's UNet instead of the whole; None if there is nothing to repeat.

    Streamed blocks are copied some blocks ahead, blocks with ranks of their own are no longer equal, and limits of
    norms and stops keep lists of layers: these are traced as a whole.
    """
    recipe, config = workload.recipe, workload.unet_config
    depths = config.get("transformer_layers_per_block")
    if not isinstance(depths, (list, tuple)) or not all(isinstance(depth, int) for depth in depths):
        return None
    special = recipe.blocks or recipe.max_weight_norm is not None or any(recipe.stops.values())
    if special or workload.fit.is_streamed or config.get("reverse_transformer_layers_per_block") is not None:
        return None
    last = len(depths) - 1
    everywhere = {f"down_blocks.{level}": depth for level, depth in enumerate(depths)}
    everywhere |= {f"up_blocks.{last - level}": depth for level, depth in enumerate(depths)}
    everywhere["mid_block"] = depths[-1]
    blocks = {name: depth for name, depth in everywhere.items() if depth > TRACED}
    few = {**config, "transformer_layers_per_block": [min(depth, TRACED) for depth in depths]}
    return Repetition(replace(workload, unet_config=few), blocks) if blocks else None


def at_block(text: str, number: int) -> str:
    """Return a path or key of a transformer block's weight with another number of the block; as it is for `OUTSIDE`."""
    return text if number == OUTSIDE else _BLOCK.sub(rf"\g<1>{number}", text, count=1)


class _Run(NamedTuple):
    """Consecutive events of one block."""

    place: Place | None
    events: list[int]


@dataclass
class _Extension:
    """A trace on its way from few blocks to all."""

    repetition: Repetition
    short: MemoryTrace
    storages: dict[_Identity, Storage] = field(default_factory=dict)

    def trace(self) -> MemoryTrace:
        """Return the extended trace."""
        known: dict[int, _Identity] = {}
        events: list[Event] = []
        for number, (_, alike) in enumerate(groupby(self._runs(), key=lambda run: run.place and run.place.transformer)):
            group = list(alike)
            repeats = _repeats(group)
            blocks = [self._identified(known, run, number if repeats else OUTSIDE) for run in group]
            if repeats:
                events += self._repeated(group, blocks)
            else:
                events += [self._at_edge(event) for block in blocks for event in block]
        return self._numbered(events)

    def _runs(self) -> list[_Run]:
        """Return consecutive events of one block: allocations by their module, frees by the allocation before them.

        Frees that follow no allocation in a block belong to the block of what is freed.
        """
        now: Place | None = None
        labeled: list[tuple[Place | None, int]] = []
        for event in self.short.events.tolist():
            own = self.repetition.place(self._storage(event).module)
            if event >= 0:
                now = own
            labeled.append((own if event >= 0 or now is None else now, event))
        runs = [_Run(place, [event for _, event in run]) for place, run in groupby(labeled, key=itemgetter(0))]
        joined = [*runs[:1], *map(self._bridged, runs, runs[1:], runs[2:]), *runs[1:][-1:]]
        return [
            _Run(place, [event for run in alike for event in run.events])
            for place, alike in groupby(joined, key=itemgetter(0))
        ]

    def _bridged(self, before: _Run, run: _Run, after: _Run) -> _Run:
        """Return a run, as part of the next block if it interrupts a block or is between two neighbors.

        Autograd may compute what is outside of a block in the middle of it, and quantizing allocates what belongs to no
        block. The gap between forward and backward is no interruption.
        """
        one, other = before.place, after.place
        if run.place is not None or one is None or other is None or one.transformer != other.transformer:
            return run
        stages = self._stages(before) | self._stages(after)
        alike = self._stages(before) and self._stages(after) and ("forward" not in stages or len(stages) == 1)
        return _Run(other, run.events) if alike and abs(one.number - other.number) <= 1 else run

    def _stages(self, run: _Run) -> set[str]:
        """Return the stages in which a run allocates anything."""
        return {self._storage(event).stage for event in run.events if event >= 0}

    def _storage(self, event: int) -> Storage:
        return self.short.storages[event if event >= 0 else ~event]

    def _identified(self, known: dict[int, _Identity], run: _Run, group: int) -> list[Event]:
        """Return the events of a run with identities, which new storages get from the group and place of the run."""
        counts: Counter[Hashable] = Counter()
        for event in run.events:
            index, storage = event if event >= 0 else ~event, self._storage(event)
            if index in known:
                continue
            place = self.repetition.place(storage.module)
            if event >= 0 and group != OUTSIDE:
                facts = _facts(storage)
                counts[facts] += 1
                known[index] = _Identity(group, run.place, (facts, counts[facts]))
            elif place is not None and storage.name is not None:
                known[index] = _Identity(OUTSIDE, place, at_block(storage.name, 0))
            else:
                known[index] = _Identity(OUTSIDE, place, index)
            self.storages[known[index]] = storage
        return [(event >= 0, known[event if event >= 0 else ~event]) for event in run.events]

    def _repeated(self, group: Sequence[_Run], blocks: list[list[Event]]) -> list[Event]:
        """Return the events of all blocks of a group that has all traced blocks."""
        assert group[0].place is not None
        transformer, first_number = group[0].place
        ordered = blocks if first_number == 0 else blocks[::-1]
        relative = [self._relative(transformer, number, block) for number, block in enumerate(ordered)]
        if not any(_are_alike(relative[REPEATED], relative[edge]) for edge in (0, LAST)):
            raise NotRepeatedError
        more = self.repetition.count(transformer) - TRACED
        first, middle, last = ordered
        copies = [[self._moved(transformer, event, by) for event in middle] for by in range(more + 1)]
        ending = [self._moved(transformer, event, more) for event in last]
        whole = [first, *copies, ending]
        return [event for block in (whole if first_number == 0 else whole[::-1]) for event in block]

    def _relative(self, transformer: str, number: int, block: Sequence[Event]) -> list[_Relative]:
        """Return events that are equal for equal blocks: storages are identified by the distance of their blocks."""
        found: list[_Relative] = []
        for is_birth, each in block:
            place = each.place
            inside = place is not None and place.transformer == transformer
            what = (each.run, each.which, _facts(self.storages[each])) if inside else each
            found.append(_Relative(is_birth, place.number - number if place and inside else None, what))
        return found

    def _moved(self, transformer: str, event: Event, by: int) -> Event:
        is_birth, each = event
        if not by or each.place is None or each.place.transformer != transformer:
            return event
        moved = each.moved(by)
        if moved not in self.storages:
            self.storages[moved] = _renumbered(self.storages[each], moved.place)
        return is_birth, moved

    def _at_edge(self, event: Event) -> Event:
        """Return an event outside of repeated blocks; it may concern only the first and the last of them."""
        place = event[1].place
        if place is None or place.number == 0:
            return event
        if place.number != LAST:
            raise NotRepeatedError
        return self._moved(place.transformer, event, self.repetition.count(place.transformer) - TRACED)

    def _numbered(self, events: Sequence[Event]) -> MemoryTrace:
        """Return the trace with storages in the order of their first event, as a recorded trace has them."""
        indices: dict[_Identity, int] = {}
        numbers: list[int] = []
        for is_birth, each in events:
            index = indices.setdefault(each, len(indices))
            numbers.append(index if is_birth else ~index)
        self._require_equal_lives(indices, Counter(each for is_birth, each in events if not is_birth))
        storages = tuple(self.storages[each] for each in indices)
        return replace(self.short, storages=storages, events=np.array(numbers, dtype=np.int32))

    def _require_equal_lives(self, found: Iterable[_Identity], freed: Mapping[_Identity, int]) -> None:
        """Raise NotRepeatedError unless each storage of a block between the edges is in all of them, and freed alike.

        They do not if the traced blocks are freed together, long after they have run.
        """
        lives: defaultdict[_Identity, list[int]] = defaultdict(list)
        for each in found:
            if each.place is not None and 0 < each.place.number < self.repetition.count(each.place.transformer) - 1:
                lives[each._replace(place=each.place._replace(number=0))].append(freed[each])
        for identity, counts in lives.items():
            assert identity.place is not None
            if len(set(counts)) > 1 or len(counts) != self.repetition.count(identity.place.transformer) - LAST:
                raise NotRepeatedError


class _Relative(NamedTuple):
    """Event, in a way that equals that of the same event of another block."""

    is_birth: bool
    distance: int | None
    """Number of blocks between the event and the block of its storage; None if it is in no block of the transformer."""
    what: Hashable


def _are_alike(middle: Sequence[_Relative], edge: Sequence[_Relative]) -> bool:
    """Return whether two blocks have the same events, except that an edge uses what is outside instead of a neighbor's.

    Only its own input or output is that.
    """
    return len(middle) == len(edge) and all(
        one == other or (one.distance and other.distance is None and one.is_birth == other.is_birth)
        for one, other in zip(middle, edge, strict=True)
    )


def _repeats(group: Sequence[_Run]) -> bool:
    """Return whether a group has all traced blocks, in order or in reverse; False for a single edge.

    Raises NotRepeatedError for any other order.
    """
    numbers = [run.place.number for run in group if run.place is not None]
    if len(numbers) <= 1:
        return False
    if numbers not in (list(range(TRACED)), list(range(LAST, -1, -1))):
        raise NotRepeatedError
    return True


def _facts(storage: Storage) -> Hashable:
    """Return a storage as if it belonged to block 0."""
    name = storage.name and at_block(storage.name, 0)
    return storage.bytes, storage.kind, storage.stage, at_block(storage.module, 0), name


def _renumbered(storage: Storage, place: Place | None) -> Storage:
    assert place is not None
    name = storage.name and at_block(storage.name, place.number)
    return Storage(storage.bytes, storage.kind, at_block(storage.module, place.number), storage.stage, name)
