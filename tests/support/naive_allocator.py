"""A slow and simple implementation of the allocator's rules that stores only segments or pages, and live blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

MIB = 2**20


@dataclass
class Segment:
    """Memory allocated at once, split into [bytes, handle or None if free]."""

    small: bool
    blocks: list[list[int | None]]

    @property
    def bytes(self) -> int:
        return sum(size or 0 for size, _ in self.blocks)


@dataclass
class NaiveAllocator:
    """Segments of their own size, with a limit and retries at it; raises MemoryError if a request does not fit."""

    capacity: int | None = None
    max_split: int | None = None
    segments: list[Segment] = field(default_factory=list)
    handles: int = 0
    retries: int = 0

    @property
    def reserved(self) -> int:
        return sum(segment.bytes for segment in self.segments)

    @property
    def allocated(self) -> int:
        return sum(size or 0 for segment in self.segments for size, handle in segment.blocks if handle is not None)

    def allocate(self, requested: int) -> int:
        size = max(512, -(-requested // 512) * 512)
        small = size <= MIB
        segment, index = self._best(size, small) or (self._open(size, small), 0)
        rest = (segment.blocks[index][0] or 0) - size
        self.handles += 1
        segment.blocks[index][1] = self.handles
        if rest >= 512 if small else rest > MIB and not self._oversize(size):
            segment.blocks[index][0] = size
            segment.blocks.insert(index + 1, [rest, None])
        return self.handles

    def _oversize(self, size: int) -> bool:
        return self.max_split is not None and size >= self.max_split

    def _best(self, size: int, small: bool) -> tuple[Segment, int] | None:
        fitting = [
            (block[0] or 0, number, index)
            for number, segment in enumerate(self.segments)
            for index, block in enumerate(segment.blocks)
            if segment.small == small and block[1] is None and (block[0] or 0) >= size
        ]
        if not fitting:
            return None
        found, number, index = min(fitting)
        if self._oversize(found) != self._oversize(size) or (self._oversize(size) and found >= size + 20 * MIB):
            return None
        return self.segments[number], index

    def _open(self, size: int, small: bool) -> Segment:
        wanted = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if not self._allowed(wanted) and not (self._return_oversize(size, small) and self._allowed(wanted)):
            self.empty_cache()
            self.retries += 1
            if not self._allowed(wanted):
                raise MemoryError
        self.segments.append(Segment(small, [[wanted, None]]))
        return self.segments[-1]

    def _allowed(self, wanted: int) -> bool:
        return self.capacity is None or self.reserved + wanted <= self.capacity

    def _return_oversize(self, size: int, small: bool) -> bool:
        if self.max_split is None:
            return False
        wanted = max(size, self.max_split)
        free = [s for s in self.segments if s.small == small and len(s.blocks) == 1 and s.blocks[0][1] is None]
        # Equal sizes: the lowest address if one is enough, the highest if the largest are taken.
        order = {id(segment): number for number, segment in enumerate(self.segments)}
        oversize = sorted((s for s in free if self._oversize(s.bytes)), key=lambda s: (s.bytes, order[id(s)]))
        enough = [segment for segment in oversize if segment.bytes >= wanted]
        if enough:
            self.segments.remove(enough[0])
            return True
        returned = 0
        while oversize and returned < wanted:
            returned += oversize[-1].bytes
            self.segments.remove(oversize.pop())
        return returned >= wanted

    def free(self, handle: int) -> None:
        for segment in self.segments:
            merged: list[list[int | None]] = []
            for size, holder in segment.blocks:
                holder = None if holder == handle else holder
                if merged and holder is None and merged[-1][1] is None:
                    merged[-1][0] = (merged[-1][0] or 0) + (size or 0)
                else:
                    merged.append([size, holder])
            segment.blocks = merged

    def empty_cache(self) -> None:
        self.segments = [s for s in self.segments if any(handle is not None for _, handle in s.blocks)]

    def layout(self) -> list[list[tuple[int, bool]]]:
        return [[(size or 0, handle is not None) for size, handle in segment.blocks] for segment in self.segments]


@dataclass
class NaiveRange:
    """The address range of one pool's expandable segment: a set of mapped pages, and live blocks."""

    page: int
    mapped: set[int] = field(default_factory=set)
    live: dict[int, int] = field(default_factory=dict)

    def runs(self) -> list[tuple[int, int, bool]]:
        """Return (begin, end, mapped) of all that is not live, split where the mapping changes; by address."""
        last = max(self.mapped, default=-1) + 1
        edges = {page * self.page for page in range(last + 1)}
        edges |= {edge for begin, size in self.live.items() for edge in (begin, begin + size)}
        ordered = sorted(edges)
        runs: list[tuple[int, int, bool]] = []
        for begin, end in zip(ordered, [*ordered[1:], 2**43], strict=True):
            if any(at <= begin < at + size for at, size in self.live.items()):
                continue
            mapped = begin // self.page in self.mapped
            if runs and runs[-1][1] == begin and runs[-1][2] == mapped:
                runs[-1] = (runs[-1][0], end, mapped)
            else:
                runs.append((begin, end, mapped))
        return runs

    def room(self, run: tuple[int, int, bool]) -> int:
        following = [other for other in self.runs() if other[0] == run[1] and not other[2]]
        return run[1] - run[0] + sum(end - begin for begin, end, _ in following)

    def best(self, size: int) -> int | None:
        fitting = sorted((r for r in self.runs() if r[2] and r[1] - r[0] >= size), key=lambda r: (r[1] - r[0], r[0]))
        if not fitting:
            return None
        index = 0
        while index + 1 < len(fitting) and self.room(fitting[index + 1]) < self.room(fitting[index]):
            index += 1
        return fitting[index][0]

    def grow(self, size: int) -> int:
        runs = self.runs()
        for begin, _, mapped in runs:
            if mapped:
                continue
            start = next((b for b, e, m in runs if e == begin and m), begin)
            stop = start
            while stop < start + size and any(b <= stop < e for b, e, _ in runs):
                stop = next(e for b, e, _ in runs if b <= stop < e)
            if stop >= start + size:
                self.mapped |= set(range(start // self.page, -(-(start + size) // self.page)))
                return start
        raise AssertionError("the range has no end")

    def unmap(self) -> None:
        for begin, end, mapped in self.runs():
            if mapped:
                self.mapped -= set(range(-(-begin // self.page), end // self.page))


@dataclass
class NaiveExpandable:
    """Expandable segments, one range for each pool."""

    capacity: int | None = None
    retries: int = 0
    handles: dict[int, tuple[bool, int]] = field(default_factory=dict)
    ranges: dict[bool, NaiveRange] = field(
        default_factory=lambda: {True: NaiveRange(2 * MIB), False: NaiveRange(20 * MIB)}
    )

    @property
    def reserved(self) -> int:
        return sum(len(pages.mapped) * pages.page for pages in self.ranges.values())

    @property
    def allocated(self) -> int:
        return sum(sum(pages.live.values()) for pages in self.ranges.values())

    def allocate(self, requested: int) -> int:
        size = max(512, -(-requested // 512) * 512)
        small = size <= MIB
        pages = self.ranges[small]
        address = pages.best(size)
        if address is None:
            wanted = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            if not self._allowed(wanted):
                self.empty_cache()
                self.retries += 1
                if not self._allowed(wanted):
                    raise MemoryError
            address = pages.grow(size)
        pages.live[address] = size
        handle = len(self.handles)
        self.handles[handle] = (small, address)
        return handle

    def _allowed(self, wanted: int) -> bool:
        return self.capacity is None or self.reserved + wanted <= self.capacity

    def free(self, handle: int) -> None:
        small, address = self.handles[handle]
        del self.ranges[small].live[address]

    def empty_cache(self) -> None:
        for pages in self.ranges.values():
            pages.unmap()

    def layout(self) -> list[list[tuple[int, bool]]]:
        """Return the mapped ranges, each as (bytes, in use)."""
        stretches: list[list[tuple[int, bool]]] = []
        for pages in (self.ranges[True], self.ranges[False]):
            pieces = [(begin, begin + size, True) for begin, size in pages.live.items()]
            pieces += [(begin, end, False) for begin, end, mapped in pages.runs() if mapped]
            last = None
            for begin, end, used in sorted(pieces):
                if begin != last:
                    stretches.append([])
                stretches[-1].append((end - begin, used))
                last = end
        return stretches
