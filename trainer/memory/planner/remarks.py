"""Collect a plan's remarks: assumptions, limits of the search, and advice on freeing memory."""

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
    """Yield the remarks on a plan; pass `whole=False` while its search has not finished."""
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
    """Yield a remark on the later shards that are encoded between epochs; nothing if there are none."""
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
    """Yield a remark that a forecast is an estimate; nothing if it is exact."""
    if forecast.exact:
        return
    if forecast.on_cpu:
        yield Remark("estimate.cpu", {"error": forecast.error})
    else:
        yield Remark("estimate.int8_products")


def memory_advice(missing: int, state: DeviceState) -> MemoryAdvice:
    """Return advice on raising a GPU's memory budget by `missing` bytes; more must be freed, as the margin grows."""
    return advise(state.to_free(missing), state.gpu.total_bytes - state.free_bytes, state.uses)
