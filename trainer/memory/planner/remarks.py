"""Collect a plan's remarks: assumptions, limits of the search, and advice on freeing memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainer.memory.trace.workload import Workload, lengths_of
from trainer.protocol.plan import MemoryAdvice, Remark

if TYPE_CHECKING:
    from trainer.gpu import GpuProcess
    from trainer.memory.device.device_state import DeviceState
    from trainer.memory.forecast.cache_shards import LaterShards
    from trainer.memory.planner.planner import PlanResult, SearchPart
    from trainer.memory.planner.request import PlanRequest
    from trainer.protocol.forecast import Forecast

INCOMPLETE: Mapping[SearchPart, str] = {"fits": "search.incomplete", "alternatives": "alternatives.incomplete"}
"""Codes of the remarks on what time ran out for."""
_MAX_PROGRAMS = 3
"""Maximum number of programs to name if the driver reports no sizes."""


def remarks_of(request: PlanRequest, planned: PlanResult, *, whole: bool = True) -> Iterator[Remark]:
    """Yield the remarks on a plan; pass `whole=False` while its search has not finished."""
    if whole and planned.left_out:
        yield Remark(INCOMPLETE[planned.left_out[0]])
    yield from request.remarks
    if planned.floor is not None:
        yield Remark("smaller.phase", {"phase": planned.floor.phase, "bytes": planned.floor.reserved})
    elif planned.smallest:
        yield Remark("smaller.none")
    yield from _of_caption_lengths(request.workload)
    if planned.stops is not None:
        values = {"step": planned.stops.step, "bytes": planned.stops.bytes, "duration": planned.stops.seconds}
        yield Remark("text_encoders.stop", values)
    if planned.pick is not None:
        yield from _of_later_shards(request.counts.later, planned.pick.forecast)
        yield from estimate_of(planned.pick.forecast)


def _of_caption_lengths(workload: Workload) -> Iterator[Remark]:
    """Yield a remark on how long captions are; nothing if all are padded to the same length anyway."""
    if workload.lengths is not None and (counts := lengths_of(workload)):
        yield Remark("captions.lengths", {"lengths": [*map(list, counts.items())]})


def _of_later_shards(later: LaterShards, forecast: Forecast) -> Iterator[Remark]:
    """Yield a remark on the later shards that are encoded between epochs; nothing if there are none."""
    encoded = [name for name, count in (("images", later.images), ("captions", later.texts)) if count]
    if encoded:
        values: dict[str, Any] = {
            "limit": later.limited,
            "encoded": encoded,
            "rounds": later.shards,
            "offloaded": forecast.encodes_alone,
        }
        if later.part < 1:
            yield Remark("cache.parts", values)
        else:
            yield Remark("cache.shards", {"epochs": later.epochs_per_shard, **values})


def estimate_of(forecast: Forecast) -> Iterator[Remark]:
    """Yield a remark that a forecast is an estimate; nothing if it is exact."""
    if forecast.exact:
        return
    if forecast.on_cpu:
        yield Remark("estimate.cpu", {"error": forecast.error})
    else:
        yield Remark("estimate.int8_products")


def memory_advice(missing: int, state: DeviceState) -> MemoryAdvice:
    """Return advice on raising a GPU's memory budget by `missing` bytes, which requires freeing more than that."""
    return _advise(state.to_free(missing), state.gpu.total_bytes - state.free_bytes, state.uses)


def _advise(to_free: int, occupied: int, uses: Sequence[GpuProcess]) -> MemoryAdvice:
    """Return advice on which programs to close to free `to_free` of the `occupied` bytes of a GPU.

    Picks the smallest single program that suffices, or else the largest ones that suffice together.
    """
    if to_free > occupied:
        return MemoryAdvice("larger_gpu", to_free)
    sized = sorted((use.bytes, use.name) for use in uses if use.bytes)
    for held, name in sized:
        if held >= to_free:
            return MemoryAdvice("close", held, (name,))
    gained, names = 0, []
    for held, name in reversed(sized):
        gained += held
        names.append(name)
        if gained >= to_free:
            return MemoryAdvice("close", gained, tuple(names))
    if uses and not sized:
        return MemoryAdvice("close_some", to_free, tuple(dict.fromkeys(use.name for use in uses[:_MAX_PROGRAMS])))
    return MemoryAdvice("free", to_free)
