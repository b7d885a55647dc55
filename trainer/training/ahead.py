"""Has the next micro-batch ready when the step asks for it: put together in a thread while the device computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import torch

from trainer.dataset.sampling import Sample
from trainer.training.batch import Assembler
from trainer.training.feed import Feed
from trainer.training.step import MicroBatch


class AssemblerAhead(Assembler):
    """An assembler that begins with the next micro-batch of the run when it is asked for one.

    Reading and checking what is cached, and drawing noise, take some milliseconds a picture at SDXL's size, in which a
    card between two steps would have nothing to do. What is in a micro-batch is a function of its samples alone, so
    it does not matter when it is made. One is held at a time; for a card in pinned memory, so that the copy to it is
    not waited for. What fails in the thread is raised when that micro-batch is asked for.
    """

    def __init__(self, assembler: Assembler, feed: Feed, device: torch.device, step: Callable[[], int]) -> None:
        """``step`` tells how many optimizer steps are done."""
        super().__init__(assembler.job, assembler.source, assembler.cache, live_text=assembler.live_text)
        self.feed = feed
        self.device = device
        self.step = step
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="assembler")
        self._begun: tuple[Sequence[Sample], int, Future[MicroBatch]] | None = None

    def assemble(self, samples: Sequence[Sample], batch_size: int) -> MicroBatch:
        """See Assembler; what was begun and is not what is asked for (the plan has changed) is left."""
        begun, self._begun = self._begun, None
        if begun is not None and begun[:2] == (samples, batch_size):
            micro = begun[2].result()
        else:
            micro = self._assemble(samples, batch_size)
        self._begin(samples)
        return micro

    def _assemble(self, samples: Sequence[Sample], batch_size: int) -> MicroBatch:
        micro = super().assemble(samples, batch_size)
        if self.device.type == "cuda":
            with suppress(RuntimeError):  # the system pins no more: then the copy to the card is waited for
                return micro.pinned()
        return micro

    def _begin(self, samples: Sequence[Sample]) -> None:
        """Begins with what follows after ``samples``, if that is known and cached."""
        following = self._following(samples)
        if following is not None:
            self._begun = (*following, self._worker.submit(self._assemble, *following))

    def _following(self, samples: Sequence[Sample]) -> tuple[Sequence[Sample], int] | None:
        step = self.step()
        batch = self.feed.batch(step)
        parts = self.feed.split(batch)
        later = parts[parts.index(tuple(samples)) + 1 :]
        if later:
            return later[0], len(batch)
        if step + 1 >= (self.job.recipe.steps or 0) or not self.feed.holds(step + 1):
            return None
        batch = self.feed.batch(step + 1)
        return self.feed.split(batch)[0], len(batch)
