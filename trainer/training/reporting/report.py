"""The report of a run, built from its events: measured memory and time next to the forecast."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from trainer.host import versions
from trainer.protocol import events
from trainer.protocol.forecast import Forecast, ForecastPhase, PhaseForecast
from trainer.protocol.progress import data_share
from trainer.protocol.report import CachingReport, Memory, PhaseReport, RunReport
from trainer.protocol.text import duration_text, size
from trainer.training.device.out_of_memory import gpu_info


def make_report(
    written: Sequence[events.Event], forecast: Forecast | None, device: torch.device, steps: int
) -> RunReport:
    """Return the report of a run of ``steps`` optimizer steps, from the events of all its attempts.

    For a killed attempt, only the memory and seconds that it reported before it was killed are counted.
    """
    done = [event for event in written if isinstance(event, events.StepEvent)]
    training = sum(event.seconds for event in done)
    flops = forecast.flops / steps * len(done) / training if forecast and training else None
    gpu = gpu_info(device.index or 0) if device.type == "cuda" else None
    driver = {"driver": gpu.driver} if gpu else {}
    return RunReport(
        gpu=gpu.name if gpu else "cpu",
        system=platform.system(),
        versions=versions() | driver,
        seconds=sum(events.attempt_seconds(written)),
        forecast_seconds=forecast.seconds if forecast else None,
        images_per_second=sum(event.images for event in done) / training if training else 0.0,
        flops_per_second=flops or None,
        share_of_limit=flops / forecast.flops_limit if flops and forecast and forecast.flops_limit else None,
        phases=dict(_phases(written, forecast)),
        time_factor=forecast.time_factor if forecast else 1.0,
        exhausted=sum(isinstance(event, events.MemoryExhausted) for event in written),
        caching=_caching(written),
        data_share=data_share(done),
    )


def summarize(report: RunReport) -> str:
    """Return the report as a few short sentences to show at the end of a run."""
    share = f", {report.share_of_limit:.0%} of the GPU's compute limit" if report.share_of_limit else ""
    sentences = [f"Speed: {report.images_per_second:.3g} images per second{share}."]
    measured = {name: phase for name, phase in report.phases.items() if phase.measured}
    if measured:
        name, highest = max(measured.items(), key=lambda item: item[1].measured.reserved if item[1].measured else 0)
        assert highest.measured is not None
        expected = f", forecast {size(highest.forecast.reserved)}" if highest.forecast else ""
        sentences.append(f"Peak memory: {size(highest.measured.reserved)} ({name.replace('_', ' ')}{expected}).")
    if report.data_share is not None:
        sentences.append(f"Waiting for data: {report.data_share:.1%} of the training time.")
    expected = f", forecast {duration_text(report.forecast_seconds)}" if report.forecast_seconds is not None else ""
    sentences.append(f"Time: {duration_text(report.seconds)}{expected}.")
    if report.exhausted:
        times = f"{report.exhausted} times" if report.exhausted > 1 else "once"
        sentences.append(f"Memory ran out {times}.")
    return " ".join(sentences)


def _phases(written: Sequence[events.Event], forecast: Forecast | None) -> Iterator[tuple[str, PhaseReport]]:
    measured_by: dict[ForecastPhase, dict[int, events.PhaseMemory]] = {}
    for event in written:
        if isinstance(event, events.PhaseMemory):
            measured_by.setdefault(event.phase, {})[event.attempt] = event
    for phase in dict.fromkeys([*measured_by, *(part.phase for part in (forecast.phases if forecast else ()))]):
        phase_forecast = forecast.of(phase) if forecast else None
        yield (
            phase,
            PhaseReport(
                seconds=sum(event.seconds for event in measured_by.get(phase, {}).values()),
                forecast=_forecast_memory(phase_forecast, forecast),
                forecast_seconds=phase_forecast.seconds if phase_forecast else None,
                measured=_measured(measured_by.get(phase, {})),
                shortfall=_shortfall(written, phase),
            ),
        )


def _caching(written: Iterable[events.Event]) -> dict[str, CachingReport]:
    """Return the encoding speed by phase, from the largest encoding pass; small ones are not representative."""
    speeds = (event for event in written if isinstance(event, events.CachingSpeed))
    return {
        event.phase: CachingReport(event.count, event.seconds, event.decode, event.encode, event.write)
        for event in sorted(speeds, key=lambda event: event.count)
    }


def _forecast_memory(phase_forecast: PhaseForecast | None, forecast: Forecast | None) -> Memory | None:
    if phase_forecast is None or forecast is None:
        return None
    return Memory(phase_forecast.allocated, phase_forecast.reserved, phase_forecast.reserved + forecast.outside)


def _measured(measured_by: Mapping[int, events.PhaseMemory]) -> Memory | None:
    """Return the highest peaks over all attempts, or None if the allocator does not record them (CPU)."""
    allocated = [event.allocated for event in measured_by.values() if event.allocated is not None]
    reserved = [event.reserved for event in measured_by.values() if event.reserved is not None]
    device = [event.device for event in measured_by.values() if event.device is not None]
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
