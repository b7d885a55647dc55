"""Building the run's next micro-batches on threads while the current one is used, so that the GPU never waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from trainer.config.fit import FitConfig
from trainer.dataset.cache_keys import encoding_settings, max_prefetched
from trainer.dataset.sampling import Sample
from trainer.host import usable_cores
from trainer.training.data.batches import BatchSchedule, Collator
from trainer.training.data.workers import PoolSize, WorkerPool
from trainer.training.step import MicroBatch

MAX_LOADER_WORKERS = min(8, max(2, usable_cores()))
"""Maximum number of loader threads unless the job sets it."""


def loader_size(fit: FitConfig) -> PoolSize:
    """Return the size of the loader's pool: what the job sets, otherwise one thread that grows if training waits."""
    workers = fit.loader_workers or 1
    most = max_prefetched(fit.prefetch_batches, fit.micro_batch or 1)
    return PoolSize(
        workers=workers,
        items=fit.prefetch_batches or min(workers + 1, most),
        max_workers=fit.loader_workers or MAX_LOADER_WORKERS,
        max_items=most,
    )


class BatchRequest(NamedTuple):
    """What a micro-batch is built from; a prefetched one is used only if all of it is the same when it is requested."""

    samples: tuple[Sample, ...]
    batch_size: int
    form: tuple[object, ...]
    """Encoding settings that the cached entries are read with; a change of plan may change them."""


class PrefetchCollator(Collator):
    """A collator that builds the run's next micro-batches in threads while the current one is used.

    Reading and verifying cache entries and drawing noise takes some milliseconds per image at SDXL's size, during which
    the GPU would idle between steps. A micro-batch depends only on its samples, so it does not matter when and by which
    thread it is built. For a GPU it is built in pinned memory, so that the copy to the GPU does not block. An error is
    raised when that micro-batch is requested. Checkpoints contain the number of finished steps, never what was
    prefetched, so a resumed run prefetches again.
    """

    def __init__(self, assembler: Collator, feed: BatchSchedule, device: torch.device, step: Callable[[], int]) -> None:
        """Wrap ``assembler``; ``step`` returns the number of finished optimizer steps."""
        super().__init__(assembler.job, assembler.source, assembler.cache, live_text=assembler.live_text)
        self.feed = feed
        self.device = device
        self.step = step
        self.pool = WorkerPool(
            self._assemble,
            loader_size(assembler.job.fit),
            name="loader",
            describe=_described,
            check=assembler.source.check,
        )
        self._following: Iterator[BatchRequest] = iter(())

    def assemble(self, samples: Sequence[Sample], batch_size: int) -> MicroBatch:
        """Return the micro-batch as `Collator.assemble` does, while the next ones are built.

        Prefetched micro-batches of other samples, for example after a change of plan, are discarded.
        """
        wanted = BatchRequest(tuple(samples), batch_size, encoding_settings(self.feed.job.fit))
        if self.pool.first != wanted:
            self.pool.clear()
            self.pool.start(wanted)
            self._following = self._after(wanted)
        self.pool.fill(self._following)
        micro = self.pool.take()
        self.pool.fill(self._following)
        return micro

    def close(self) -> None:
        """End the threads."""
        self.pool.close()

    def _assemble(self, request: BatchRequest) -> MicroBatch:
        micro = super().assemble(request.samples, request.batch_size)
        if self.device.type == "cuda":
            with suppress(RuntimeError):  # the system has no more memory to pin; the copy to the GPU then blocks
                return micro.pinned()
        return micro

    def _after(self, request: BatchRequest) -> Iterator[BatchRequest]:
        """Yield the micro-batches that follow ``request``, in this step and in those whose data is cached."""
        first = self.step()
        # Entries of the next shard are encoded only when its first step is prepared.
        for step in range(first, self.job.recipe.steps or 0):
            if step > first and not self.feed.holds(step):
                return
            batch = self.feed.batch(step)
            parts = self.feed.split(batch)
            start = parts.index(request.samples) + 1 if step == first else 0
            for part in parts[start:]:
                yield BatchRequest(part, len(batch), request.form)


def _described(request: BatchRequest) -> str:
    """Return the names of a micro-batch's images for an error message."""
    first, *others = (sample.image.path.name for sample in request.samples)
    return f"{first} and {len(others)} more" if others else first
