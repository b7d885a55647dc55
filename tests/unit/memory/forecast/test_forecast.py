"""What a simulated run records of its phases."""

from __future__ import annotations

import numpy as np

from trainer.memory.device.device_state import state_of_listed_gpu
from trainer.memory.device.gpu_specs import find_gpu
from trainer.memory.forecast.forecast import Simulation
from trainer.memory.trace.memory_trace import MemoryTrace, Storage

MIB = 1 << 20


def trace(*storages: Storage, freed: bool) -> MemoryTrace:
    """Return a trace that allocates storages and, if ``freed``, frees them again."""
    events = [*range(len(storages)), *(~place for place in range(len(storages)) if freed)]
    return MemoryTrace("", storages, np.array(events, dtype=np.int32), ())


def test_of_two_occurrences_that_reserve_the_same_the_one_that_allocates_more_counts() -> None:
    """Between steps, cuBLAS keeps a workspace from what was cached before: more is allocated, but not reserved."""
    simulation = Simulation(state_of_listed_gpu(find_gpu("RTX 3060"), system="Linux"), None)
    work = trace(Storage(10 * MIB, "temporary", "", "forward"), freed=True)
    lasting = trace(Storage(8 * MIB, "weights", "", "forward", "lasting"), freed=False)
    assert simulation.play("train", [trace(Storage(30 * MIB, "temporary", "", "forward"), freed=True)])
    assert simulation.play("validate", [work], join="highest")
    assert simulation.play("train", [lasting]) and simulation.play("validate", [work], join="highest")
    (played,) = simulation.phases["validate"].played
    assert int(played.reserved.max()) == 30 * MIB
    assert int(played.allocated.max()) == 18 * MIB
