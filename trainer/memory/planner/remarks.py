"""Collect what a plan reports beside its forecasts: assumptions, limits of the search, and how to free memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainer.protocol.plan import MemoryAdvice, Remark, advise

if TYPE_CHECKING:
    from trainer.memory.device.device_state import DeviceState
    from trainer.memory.forecast.cache_shards import LaterShards
    from trainer.memory.planner.planner import PlanResult
    from trainer.memory.planner.request import PlanRequest
    from trainer.protocol.forecast import Forecast


def remarks_of(request: PlanRequest, planned: PlanResult, *, whole: bool = True) -> Iterator[Remark]:
    """Yield the remarks on a plan; whether the search was cut short is known only once the plan is `whole`."""
    if whole and not planned.complete:
        yield Remark("search.incomplete")
    elif whole and not planned.complete_beside:
        yield Remark("alternatives.incomplete")
    yield from request.remarks
    if planned.floor is not None:
        yield Remark("smaller.phase", {"phase": planned.floor.phase, "bytes": planned.floor.reserved})
    elif planned.smallest:
        yield Remark("smaller.none")
    if planned.pick is not None:
        yield from _of_later_shards(request.counts.later, planned.pick.forecast)
        yield from estimate_of(planned.pick.forecast)


def _of_later_shards(later: LaterShards, forecast: Forecast) -> Iterator[Remark]:
    """Yield how a cache above its size limit is filled; nothing where all of it is encoded before the first step."""
    encoded = [name for name, count in (("images", later.images), ("captions", later.texts)) if count]
    if encoded:
        values = {
            "epochs": later.epochs_per_shard,
            "limit": later.limited,
            "encoded": encoded,
            "rounds": later.shards,
            "offloaded": forecast.encodes_alone,
        }
        yield Remark("cache.shards", values)


def estimate_of(forecast: Forecast) -> Iterator[Remark]:
    """Yield the remark that a forecast is an estimate; nothing for an exact one."""
    if forecast.exact:
        return
    if forecast.on_cpu:
        yield Remark("estimate.cpu", {"error": forecast.error})
    else:
        yield Remark("estimate.int8_products")


def memory_advice(missing: int, state: DeviceState) -> MemoryAdvice:
    """Return how to raise the memory budget of a GPU by `missing` bytes, which takes more than that to be freed."""
    return advise(state.to_free(missing), state.gpu.total_bytes - state.free_bytes, state.uses)
