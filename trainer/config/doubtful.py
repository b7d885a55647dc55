"""Finds settings that work and that hardly anybody wants together with this base, so that they are told."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.job import Job


def unforeseen(job: Job) -> Iterator[tuple[str, str]]:
    """Experiments that forecasts know nothing of, as (key, what they count instead); runs with them teach nothing."""
    others = "so memory and time may be others with this experiment"
    if job.fit.compile:
        yield "fit.compile", f"forecasts count blocks that are not compiled, {others}"
    if job.fit.channels_last:
        yield "fit.channels_last", f"forecasts count maps that lie as usual, {others}"


def doubtful(job: Job, *, zero_terminal_snr: bool) -> Iterator[tuple[str, str]]:
    """Settings to think over, as (key, reason); ``zero_terminal_snr`` is what the base was found or stated to be."""
    yield from unforeseen(job)
    if job.recipe.objective.debiased and zero_terminal_snr and job.recipe.objective.timestep_max == 999:
        yield (
            "recipe.objective.debiased",
            "this base is trained down to pure noise (zero terminal SNR), which then counts a thousand times as much "
            "as the cleanest pictures, though nothing of a picture is left in it; min_snr_gamma gives it no weight",
        )
