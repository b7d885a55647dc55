"""Writes what a finished run says of itself: forecast beside measured, from its events."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from trainer.host import versions
from trainer.protocol import events
from trainer.protocol.forecast import Forecast, ForecastPhase, PhaseForecast
from trainer.protocol.report import CachingReport, Memory, PhaseReport, RunReport
from trainer.protocol.text import about, size
from trainer.training.device.out_of_memory import card_of


def make_report(
    written: Sequence[events.Event], forecast: Forecast | None, device: torch.device, steps: int
) -> RunReport:
    """The report of a run of ``steps`` optimizer steps from all events of all its attempts.

    An attempt that was killed has told what its phases held, and their seconds only up to then.
    """
    done = [event for event in written if isinstance(event, events.StepEvent)]
    training = sum(event.seconds for event in done)
    flops = forecast.flops / steps * len(done) / training if forecast and training else None
    card = card_of(device.index or 0) if device.type == "cuda" else None
    driver = {"driver": card.driver} if card else {}
    return RunReport(
        card=card.name if card else "cpu",
        system=platform.system(),
        versions=versions() | driver,
        seconds=sum(_attempt_seconds(written)),
        forecast_seconds=forecast.seconds if forecast else None,
        pictures_per_second=sum(event.pictures for event in done) / training if training else 0.0,
        flops_per_second=flops or None,
        share_of_limit=flops / forecast.flops_limit if flops and forecast and forecast.flops_limit else None,
        phases=dict(_phases(written, forecast)),
        time_factor=forecast.time_factor if forecast else 1.0,
        exhausted=sum(isinstance(event, events.MemoryExhausted) for event in written),
        caching=_caching(written),
    )


def in_short(report: RunReport) -> str:
    """The report in one sentence a subject, for the end of a run."""
    share = f", {report.share_of_limit:.0%} of what the card can compute" if report.share_of_limit else ""
    told = [f"Trained {report.pictures_per_second:.3g} pictures a second{share}."]
    measured = {name: phase for name, phase in report.phases.items() if phase.measured}
    if measured:
        name, highest = max(measured.items(), key=lambda item: item[1].measured.reserved if item[1].measured else 0)
        assert highest.measured is not None
        foreseen = f", forecast {size(highest.forecast.reserved)}" if highest.forecast else ""
        told.append(f"Most memory: {size(highest.measured.reserved)} ({name.replace('_', ' ')}{foreseen}).")
    foreseen = f", forecast {about(report.forecast_seconds)}" if report.forecast_seconds is not None else ""
    told.append(f"Time: {about(report.seconds)}{foreseen}.")
    if report.exhausted:
        told.append(f"Memory ran out {report.exhausted} times." if report.exhausted > 1 else "Memory ran out once.")
    return " ".join(told)


def _attempt_seconds(written: Iterable[events.Event]) -> Iterator[float]:
    """How long each attempt lasted, by its first and last word."""
    times: dict[int, list[float]] = {}
    for event in written:
        times.setdefault(event.attempt, []).append(event.time)
    yield from (told[-1] - told[0] for told in times.values())


def _phases(written: Sequence[events.Event], forecast: Forecast | None) -> Iterator[tuple[str, PhaseReport]]:
    told: dict[ForecastPhase, dict[int, events.PhaseMemory]] = {}
    for event in written:
        if isinstance(event, events.PhaseMemory):
            told.setdefault(event.phase, {})[event.attempt] = event
    for phase in dict.fromkeys([*told, *(part.phase for part in (forecast.phases if forecast else ()))]):
        foreseen = forecast.of(phase) if forecast else None
        yield (
            phase,
            PhaseReport(
                seconds=sum(event.seconds for event in told.get(phase, {}).values()),
                forecast=_forecast_memory(foreseen, forecast),
                forecast_seconds=foreseen.seconds if foreseen else None,
                measured=_measured(told.get(phase, {})),
                shortfall=_shortfall(written, phase),
            ),
        )


def _caching(written: Iterable[events.Event]) -> dict[str, CachingReport]:
    """Of each phase the most that were encoded in one go: what a few took says little."""
    told = sorted((event for event in written if isinstance(event, events.CachingSpeed)), key=lambda event: event.count)
    return {
        event.phase: CachingReport(event.count, event.seconds, event.decode, event.encode, event.write)
        for event in told
    }


def _forecast_memory(foreseen: PhaseForecast | None, forecast: Forecast | None) -> Memory | None:
    if foreseen is None or forecast is None:
        return None
    return Memory(foreseen.allocated, foreseen.reserved, foreseen.reserved + forecast.outside)


def _measured(told: Mapping[int, events.PhaseMemory]) -> Memory | None:
    """The highest of all attempts; None where the allocator keeps no counts."""
    allocated = [event.allocated for event in told.values() if event.allocated is not None]
    reserved = [event.reserved for event in told.values() if event.reserved is not None]
    device = [event.device for event in told.values() if event.device is not None]
    return Memory(max(allocated), max(reserved), max(device, default=None)) if allocated and reserved else None


def _shortfall(written: Iterable[events.Event], phase: ForecastPhase) -> int:
    return max(
        (
            event.requested or 0
            for event in written
            if isinstance(event, events.MemoryExhausted) and event.phase == phase
        ),
        default=0,
    )
