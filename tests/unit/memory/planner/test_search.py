"""The search for a plan: its answer is that of looking at everything; what it may choose among."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest

from trainer.config.fit import PLANNED, FitConfig
from trainer.memory.planner.evaluator import Preference, best, time_step
from trainer.memory.planner.planner import _encoding_ways
from trainer.memory.planner.search_space import Placement, candidates, micro_batches, nested_sets, placements, within
from trainer.memory.trace.memory_trace import MemoryTrace, Storage, StorageKind, UnetBlock, blocks, held_after_forward
from trainer.protocol.forecast import SEARCHED_FIT_KEYS


@dataclass
class Known:
    """An appraiser whose bounds are sometimes loose, sometimes tight, never too high; some fit only at a cost."""

    truth: list[Preference]
    fitting: list[bool]
    bounds: list[Preference]
    hints: list[bool]
    costs: list[int]
    looked: set[int] = field(default_factory=set)
    tried: list[int] = field(default_factory=list)
    foreseen: list[Sequence[int]] = field(default_factory=list)
    """What was next in line whenever one was looked at."""

    def preference(self, candidate: int) -> Preference:
        known = self.truth[candidate] if candidate in self.looked else self.bounds[candidate]
        return self.at_cost(known, candidate) if candidate in self.tried else known

    def at_cost(self, known: Preference, candidate: int) -> Preference:
        return known._replace(time=known.time + self.costs[candidate])

    def exact(self, candidate: int) -> bool:
        return candidate in self.looked

    def cannot_fit(self, candidate: int) -> bool:
        return self.hints[candidate] and not self.fitting[candidate]

    def prefetch(self, following: Callable[[], Sequence[int]]) -> None:
        self.following = following

    def refine(self, candidate: int) -> None:
        assert candidate not in self.looked
        self.foreseen.append(self.following()[:1])
        self.looked.add(candidate)
        # Looking at one tells something of another.
        other = random.Random(candidate).randrange(len(self.truth))
        self.bounds[other] = max(self.bounds[other], Preference(self.truth[other].quality, 0, 0, 0, 0))

    def fits(self, candidate: int) -> bool:
        self.tried.append(candidate)
        return self.fitting[candidate]


@pytest.mark.parametrize("seed", range(200))
def test_the_search_finds_what_looking_at_everything_finds(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randrange(1, 30)
    # Few values, so that there are ties at every place.
    truth = [Preference(*(chance.randrange(3) for _ in range(5))) for _ in range(count)]
    bounds = [Preference(one.quality, *(chance.randrange(value + 1) for value in one[1:])) for one in truth]
    fitting = [chance.random() < 0.3 for _ in range(count)]
    hints = [chance.random() < 0.5 for _ in range(count)]
    known = Known(truth, fitting, bounds, hints, [chance.choice((0, 0, 1, 2)) for _ in range(count)])
    wanted = min((known.at_cost(truth[index], index) for index in range(count) if fitting[index]), default=None)
    found = best(range(count), known)
    assert (found is None) == (wanted is None)
    if found is not None:
        assert known.at_cost(truth[found], found) == wanted
        assert found in known.looked


def test_what_cannot_be_better_is_not_looked_at() -> None:
    truth = [Preference(0, 10, 0, 0, 0), Preference(0, 20, 0, 0, 0), Preference(1, 1, 0, 0, 0)]
    bounds = [Preference(0, 0, 0, 0, 0), Preference(0, 15, 0, 0, 0), Preference(1, 0, 0, 0, 0)]
    known = Known(truth, [True] * 3, bounds, [False] * 3, [0] * 3)
    assert best(range(3), known) == 0
    assert known.looked == {0}
    assert known.tried == [0]
    assert known.foreseen == [[1]]


def test_times_within_a_per_cent_count_as_one() -> None:
    assert time_step(1000.0) == time_step(1000.0)
    assert time_step(1010.1) - time_step(1000.0) == 1
    assert time_step(2000.0) - time_step(1000.0) == pytest.approx(70, abs=1)
    assert time_step(0.0) < time_step(1e-6)


@pytest.mark.parametrize(
    ("effective", "sizes"),
    [
        (1, (1,)),
        (2, (2, 1)),
        (4, (4, 2, 1)),
        (5, (5, 3, 2, 1)),
        (8, (8, 4, 3, 2, 1)),
        (6, (6, 3, 2, 1)),
    ],
)
def test_micro_batches_are_even_parts(effective: int, sizes: tuple[int, ...]) -> None:
    assert micro_batches(effective) == sizes


@pytest.mark.parametrize("effective", [16, 63, 64, 65, 100, 1000, 4096])
def test_large_batches_are_cut_into_few_kinds_of_parts(effective: int) -> None:
    sizes = micro_batches(effective)
    assert sizes[-1] == 1
    assert sizes[0] <= 64
    assert len(sizes) <= 16
    assert all(large > small for large, small in pairwise(sizes))
    for size in sizes:
        parts = -(-effective // size)
        assert -(-effective // parts) == size, "a smaller size would need as many parts"


def storage(size: int, module: str, stage: str = "forward", kind: StorageKind = "activations", name=None) -> Storage:
    return Storage(size, kind, module, stage, name)


def test_what_a_block_holds_is_what_lives_when_backward_begins() -> None:
    storages = (
        storage(100, "unet.down_blocks.0.resnets.0"),
        storage(7, "unet.down_blocks.0.resnets.0"),  # gone before backward
        storage(30, "unet.mid_block.attentions.0"),
        storage(5, "unet.conv_in"),
        storage(1000, "unet.up_blocks.0", "backward"),
        storage(64, "unet.up_blocks.0.conv", name="kept for later"),
    )
    events = np.array([0, 1, ~1, 2, 3, 5, 4, ~4, ~0, ~2, ~3], dtype=np.int32)
    held = held_after_forward(MemoryTrace("micro", storages, events, ()))
    assert held == {"down_blocks.0": 100, "mid_block": 30, None: 5}


def test_blocks_come_in_the_order_of_what_they_save_for_their_cost() -> None:
    weights = tuple(
        storage(size, f"unet.{name}.conv", "load", "weights", f"w {name}")
        for name, size in (("down_blocks.0", 40), ("down_blocks.1", 40), ("mid_block", 40), ("up_blocks.1", 40))
    )
    micro = tuple(
        storage(size, f"unet.{name}.x")
        for name, size in (("down_blocks.0", 100), ("down_blocks.1", 100), ("mid_block", 10), ("up_blocks.1", 200))
    )
    found = blocks(
        MemoryTrace("weights", weights, np.arange(4, dtype=np.int32), ()),
        MemoryTrace("micro", micro, np.arange(4, dtype=np.int32), ()),
    )
    # Where pictures are halved, a weight is applied to a quarter of the places.
    assert [block.name for block in found] == ["down_blocks.1", "up_blocks.1", "down_blocks.0", "mid_block"]
    assert nested_sets(found) == (
        "none",
        ("down_blocks.1",),
        ("down_blocks.1", "up_blocks.1"),
        ("down_blocks.0", "down_blocks.1", "up_blocks.1"),
        "full",
    )


def test_sets_within_sets() -> None:
    sets = nested_sets([UnetBlock(name, 0, 1.0) for name in ("up_blocks.0", "mid_block", "down_blocks.0")])
    for place, inner in enumerate(sets):
        assert [within(inner, outer) for outer in sets] == [place <= other for other in range(len(sets))]


def test_what_the_user_wrote_is_kept() -> None:
    start = FitConfig(device="cuda:0", dtype="bf16", vae_dtype="fp32", attention="auto")
    grid = {
        "effective_batch": 4,
        "checkpointing": ("none", ("mid_block",), "full"),
        "placements": (Placement("none", "none"), Placement("none", "full"), Placement("nf4", "none")),
    }
    free = candidates(FitConfig(), start, previews=True, **grid)
    assert len(free) == len({fit.model_dump_json() for fit in free}) == (3 + 2 + 3) * 3 * 2 * 2
    assert len(candidates(FitConfig(), start, previews=False, **grid)) == (3 + 2 + 3) * 3
    written = FitConfig(
        micro_batch=9, gradient_checkpointing="full", quantize="int8", vae_tiling=False, preview_offload=True
    )
    assert placements(written) == (Placement("int8", "none"), Placement("int8", "full"))
    (only,) = candidates(written, start, previews=False, **grid | {"placements": placements(written)[:1]})
    assert only == start.replaced(
        micro_batch=4,
        gradient_checkpointing="full",
        quantize="int8",
        stream="none",
        vae_tiling=False,
        preview_offload=True,
    )


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({}, [("none", "none"), ("none", "full"), ("int8", "none"), ("nf4", "none")]),
        ({"quantize": "none"}, [("none", "none"), ("none", "full")]),
        ({"quantize": "nf4"}, [("nf4", "none"), ("nf4", "full")]),
        ({"stream": 20}, [("none", 20), ("int8", 20), ("nf4", 20)]),
        ({"stream": "none"}, [("none", "none"), ("int8", "none"), ("nf4", "none")]),
        ({"stream": "full", "quantize": "int8"}, [("int8", "full")]),
    ],
)
def test_a_base_is_streamed_before_it_is_quantized(
    written: dict[str, object], expected: list[tuple[str, object]]
) -> None:
    assert list(placements(FitConfig.model_validate(written))) == expected


def test_a_run_uses_every_key_that_a_plan_chooses() -> None:
    chosen = {"dtype", *SEARCHED_FIT_KEYS, *(key for way in _encoding_ways(FitConfig(), bf16=True) for key in way)}
    assert chosen == set(PLANNED)
