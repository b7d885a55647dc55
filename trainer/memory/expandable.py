"""Expandable segments: one range of addresses a pool, mapped in pages as it is needed."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator

from trainer.memory.blocks import Block, Blocks, Pool, run_of_free

# An expandable segment reserves addresses for 1.125 times the card; here, for more than any card has.
EXPANDABLE_RANGE = 2**44


class ExpandableBlocks(Blocks):
    """Blocks among which unmapped ones may be, that nothing is held of."""

    def _reserve_addresses(self, pools: Iterable[Pool]) -> None:
        for number, pool in enumerate(pools):
            address = number * EXPANDABLE_RANGE
            self._blocks[address] = block = Block(address, EXPANDABLE_RANGE, pool, None, None)
            block.mapped = False
            pool.unmapped.append(address)

    def _expand(self, pool: Pool, size: int) -> Block:
        """A block of at least ``size`` bytes at the lowest address where free and unmapped blocks make room for it."""
        candidate = next(block for block in self._growable(pool) if run_of_free(block) >= size)
        if not candidate.mapped:
            candidate = self._map(candidate, min(candidate.size, size))
        while candidate.size < size:
            following = candidate.after
            assert following is not None and not following.mapped
            candidate = self._map(following, min(following.size, size - candidate.size))
        self._unfile(candidate)
        return candidate

    def _growable(self, pool: Pool) -> Iterator[Block]:
        """Where a block might begin: at the unmapped blocks, or at the free one that lies before."""
        for address in pool.unmapped:
            block = self._blocks[address]
            yield block.before if block.before and block.before.requested is None else block

    def _map(self, block: Block, size: int) -> Block:
        """Maps as many pages of an unmapped block as hold ``size`` bytes; returns the free block they fall to."""
        page = block.pool.page
        mapped = min(-(-size // page) * page, block.size)
        block.pool.unmapped.remove(block.address)
        if mapped < block.size:
            rest = block.size - mapped
            block.size = mapped
            remaining = self._insert_after(block, rest)
            remaining.mapped = False
            insort(block.pool.unmapped, remaining.address)
        block.mapped = True
        self.reserved += mapped
        return self._merge_and_file(block)

    def _unmap(self, block: Block) -> None:
        """Gives the whole pages of a free block back to the driver."""
        page, base = block.pool.page, block.address // EXPANDABLE_RANGE * EXPANDABLE_RANGE
        first = -(-(block.address - base) // page) * page + base
        last = (block.address + block.size - base) // page * page + base
        if first >= last:
            return
        self._unfile(block)
        self.reserved -= last - first
        beyond = block.address + block.size - last
        if first > block.address:
            block.size = first - block.address
            self._file(block)
            block = self._insert_after(block, last - first)
        else:
            block.size = last - first
        if beyond:
            self._file(self._insert_after(block, beyond))
        self._make_unmapped(block)

    def _make_unmapped(self, block: Block) -> None:
        """Enters a block as unmapped, one with its unmapped neighbours."""
        block.mapped = False
        if block.after is not None and not block.after.mapped:
            block.pool.unmapped.remove(block.after.address)
            self._swallow(block, block.after)
        if block.before is not None and not block.before.mapped:
            self._swallow(block.before, block)
        else:
            insort(block.pool.unmapped, block.address)
