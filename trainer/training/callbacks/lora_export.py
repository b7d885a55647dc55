"""Export of a run's LoRA files, each with metadata from the frozen job and a preview image."""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from torch import Tensor

from trainer.adapter.attach import Adapter
from trainer.adapter.export import ExportFacts, count_tags, export_lora, lora_metadata, write_side_files
from trainer.adapter.plain_copy import plain_copy
from trainer.base.source import BaseSource
from trainer.config.job import Job
from trainer.config.methods import ADAPTERS
from trainer.dataset.image import ImageRecord, count_files, image_recipe
from trainer.errors import LoraFileError, RunError
from trainer.files.header import read_header
from trainer.protocol import events, files
from trainer.protocol.files import safe_name, step_ending
from trainer.protocol.forecast import ForecastPhase
from trainer.protocol.reading import read_bytes
from trainer.protocol.run_directory import RunDirectory
from trainer.training.checkpoint import as_resumable
from trainer.training.device.device import DTYPES
from trainer.training.engine import Engine, StepResult, TrainingProgress
from trainer.training.optim.optimizer import averaged_weights
from trainer.training.reporting.reporter import Reporter
from trainer.training.step import validation_loss


def step_of(path: Path) -> int:
    """Return the step number in the file name of an intermediate LoRA."""
    return int(path.stem.rpartition("-step")[2])


class Exporter:
    """Writer of a run's LoRA files, with their names and metadata."""

    def __init__(
        self, run: RunDirectory, job: Job, source: BaseSource, images: Sequence[ImageRecord], steps_per_epoch: int
    ) -> None:
        self.run = run
        self.job = job
        self.source = source
        self.images = tuple(images)
        self.steps_per_epoch = steps_per_epoch
        self.stem = safe_name(job.name, "lora")

    def step_path(self, step: int) -> Path:
        """Return the path of the LoRA exported at a step: output/NAME-step000500.safetensors."""
        return self.run.output / f"{self.stem}{step_ending(step)}.safetensors"

    def final_path(self) -> Path:
        """Return the path of the finished LoRA: output/NAME.safetensors."""
        return self.run.output / f"{self.stem}.safetensors"

    def export(
        self,
        weights: Mapping[str, Tensor],
        adapter: Adapter,
        progress: TrainingProgress,
        *,
        final: bool,
        ema: bool = False,
    ) -> tuple[Path, str]:
        """Write and verify the current LoRA; return its path and SHA-256.

        With ``ema``, the weights are the moving average, whose files have -ema at the end of their names. Raises
        ResumableError and LoraFileError.
        """
        path = self.final_path() if final else self.step_path(progress.step)
        if ema:
            path = _ema_path(path)
        facts = self.facts(progress.step, ema=ema)
        dtype = DTYPES[self.job.output.dtype]
        try:
            metadata = lora_metadata(facts, adapter, path.stem)
            if self.job.output.diffusers and not adapter.changes:
                converted = path.with_name(f"{path.stem}.diffusers.safetensors")
                export_lora(converted, weights, adapter, metadata, dtype=dtype, naming="diffusers")
            shown = ema == (self.job.recipe.ema_decay is not None)  # previews show only one of the two
            write_side_files(path, facts, self._preview(progress.step) if shown else None)
            # Written last, so that if this file exists, the others exist too.
            sha256 = export_lora(path, weights, adapter, metadata, dtype=dtype)
        except OSError as error:
            raise as_resumable(error, self.run.output) from error
        return path, sha256

    def export_copy(
        self, weights: Mapping[str, Tensor], adapter: Adapter, progress: TrainingProgress, *, ema: bool
    ) -> Path:
        """Write the finished file's copy as a plain LoRA, and one for diffusers if the job asks for it.

        With ``ema``, it is the copy of the moving average.
        """
        final = _ema_path(self.final_path()) if ema else self.final_path()
        path = final.with_name(f"{final.stem}-lora.safetensors")
        metadata = lora_metadata(self.facts(progress.step, ema=ema), adapter, path.stem)
        dtype = DTYPES[self.job.output.dtype]
        try:
            if self.job.output.diffusers:
                converted = final.with_name(f"{final.stem}.diffusers.safetensors")
                export_lora(converted, weights, adapter, metadata, dtype=dtype, naming="diffusers")
            export_lora(path, weights, adapter, metadata, dtype=dtype)
        except OSError as error:
            raise as_resumable(error, self.run.output) from error
        return path

    def _preview(self, step: int) -> Path | None:
        """Return the preview image of the first prompt at this step, or None if there is none."""
        image = self.run.samples / f"step-{step:08d}-0.png"
        return image if image.exists() else None

    def add_preview(self, step: int) -> None:
        """Copy a step's preview next to its LoRA if both exist."""
        lora, image = self.step_path(step), self._preview(step)
        if self.job.recipe.ema_decay is not None:
            lora = _ema_path(lora)
        if image and lora.exists():
            files.write_bytes(lora.with_suffix(".png"), read_bytes(image, "image"))

    def finished_step(self) -> int | None:
        """Return the step of the finished LoRA exported before the run was extended, or None if there is none."""
        with suppress(LoraFileError):
            step = read_header(self.final_path(), "lora").metadata.get("ss_steps", "")
            return int(step) if step.isdecimal() else None
        return None

    def prune(self, keep: int | None, protect: Collection[int | None]) -> None:
        """Delete intermediate LoRAs except the newest ``keep`` and those at steps in ``protect``; None keeps all."""
        if keep is None:
            return
        stem = glob.escape(self.stem)
        for old in sorted(self.run.output.glob(f"{stem}-step*[0-9].safetensors"), key=step_of)[:-keep]:
            if step_of(old) not in protect:
                for lora in (_ema_path(old), old):
                    for path in self.run.output.glob(f"{glob.escape(lora.stem)}.*"):
                        path.unlink(missing_ok=True)

    def facts(self, step: int, *, ema: bool = False) -> ExportFacts:
        """Return the metadata for this run's LoRA at ``step``, or its moving average; the same in every attempt."""
        job, source = self.job, self.source
        trained = [image for image in self.images if image.kind == "train"]
        triggers = dict.fromkeys(image.trigger for image in trained if image.trigger)
        captions = (
            (caption, image_recipe(image, job.recipe).captions.separator)
            for image in trained
            for caption in image.captions[:1]
        )
        return ExportFacts(
            title=job.name,
            family=source.family,
            prediction=source.prediction,
            zero_terminal_snr=source.zero_terminal_snr,
            base_name=source.path.name if "://" in job.base.model else job.base.name,
            base_sha256=source.files[source.path.name] if source.form == "single" else None,
            recipe=job.recipe,
            ema=ema,
            dtype=job.fit.dtype or "fp32",
            step=step,
            epoch=self._epochs(step),
            epochs=self._epochs(job.recipe.steps or 0),
            images=count_files(trained),
            regularization_images=count_files(image for image in self.images if image.kind == "regularization"),
            started_at=self._started_at(),
            trigger_words=tuple(triggers),
            buckets=Counter(image.bucket for image in trained),
            author=job.output.author,
            license=job.output.license,
            description=job.output.description,
            tags=count_tags(captions) if job.output.tag_frequency else None,
        )

    def _epochs(self, step: int) -> int:
        return -(-step // self.steps_per_epoch)

    def _started_at(self) -> float:
        started = self.run.attempts()[0].get("started")
        if not isinstance(started, int | float):
            sentence = "Could not export the LoRA: run.json does not state when the run started."
            raise RunError("run.damaged", sentence, "Start its job again with `train`.")
        return float(started)


def _ema_path(path: Path) -> Path:
    """Return the path of the moving average that is written next to a LoRA."""
    return path.with_name(f"{path.stem}-ema{path.suffix}")


def due(step: int, every: int | None) -> bool:
    """Return whether an action that repeats every ``every`` steps is due after ``step``; False if ``every`` is None."""
    return bool(every) and step > 0 and step % (every or 1) == 0


@contextmanager
def export_mode(engine: Engine) -> Iterator[None]:
    """Put the model into its exported form inside the block: without dropout, with Schedule-Free's averaged weights."""
    engine.adapter.training = False
    try:
        with averaged_weights(engine.optimizer, engine.master_weights):
            yield
    finally:
        engine.adapter.training = True


@contextmanager
def preview_mode(engine: Engine) -> Iterator[None]:
    """Put the model into its exported form inside the block, with the moving average of the weights if there is one."""
    with export_mode(engine), engine.ema.in_use() if engine.ema else nullcontext():
        yield


class ExportCallback:
    """Callback that exports the LoRA; all files are kept unless the user sets a limit."""

    phase: ForecastPhase = "save"

    def __init__(self, engine: Engine, exporter: Exporter, reporter: Reporter) -> None:
        self.engine = engine
        self.exporter = exporter
        self.reporter = reporter
        self.finished = exporter.finished_step()

    def at_start(self, progress: TrainingProgress) -> None:
        """Export this step's LoRA if it is due but missing, as after a kill or when a finished run is extended."""
        if self._due(progress) and not self.exporter.step_path(progress.step).exists():
            self.save(progress)

    def after_step(self, progress: TrainingProgress, result: StepResult) -> None:
        """Export the LoRA if it is due after this step."""
        if self._due(progress):
            self.save(progress)

    def _due(self, progress: TrainingProgress) -> bool:
        """Return whether to export: at the set interval, at the best step, and where the run ended before an extension.

        The last step is never due, because its LoRA is exported as the finished file.
        """
        step = progress.step
        at_interval = due(step, self.engine.job.report.saving.every_steps)
        return not self.engine.is_done and (at_interval or step in (progress.best_step, self.finished))

    def save(self, progress: TrainingProgress, *, final: bool = False) -> Path:
        """Export the LoRA now, under the name of its step or of the finished file, and return its path.

        The moving average is written first, so that if the LoRA exists, it exists too.
        """
        engine, exporter = self.engine, self.exporter
        self.reporter.phase("save", 0, 1)
        if final and engine.ema and engine.adapter.changes:
            with engine.ema.in_use():
                self._save_copy(engine.ema.weights, engine.adapter, progress, ema=True)
        average = engine.ema and exporter.export(engine.ema.weights, engine.adapter, progress, final=final, ema=True)
        with averaged_weights(engine.optimizer, engine.master_weights):
            masters, adapter = engine.master_weights.masters, engine.adapter
            if final and adapter.changes:
                self._save_copy(masters, adapter, progress)
            path, sha256 = exporter.export(masters, adapter, progress, final=final)
        self._report(progress, path, sha256)
        if average:
            self._report(progress, *average, ema=True)
        self.reporter.phase("save", 1, 1)
        if not final:
            self.exporter.prune(self.engine.job.report.saving.keep, (progress.best_step, self.finished))
        return path

    def _report(self, progress: TrainingProgress, path: Path, sha256: str, *, ema: bool | None = None) -> None:
        self.reporter.write(events.Saved(step=progress.step, file=f"output/{path.name}", sha256=sha256, ema=ema))

    def _save_copy(
        self, weights: Mapping[str, Tensor], adapter: Adapter, progress: TrainingProgress, *, ema: bool = False
    ) -> None:
        """Write the copy as a plain LoRA, and report how far its outputs are off on images of the last step."""
        engine = self.engine
        batch = engine.batches.batch(max(progress.step - 1, 0))
        micro = engine.collator.assemble(engine.batches.split(batch)[0], len(batch))

        def forward() -> None:
            validation_loss(engine.models, engine.noise_schedule, micro.to(engine.device))

        copy = plain_copy(adapter, weights, forward)
        path = self.exporter.export_copy(copy.weights, copy.adapter, progress, ema=ema)
        kind = ADAPTERS[engine.job.recipe.adapter].title
        sentence = (
            f"{path.name} is a copy as a plain LoRA for programs that do not load {kind}: on images of the last step, "
            f"its outputs are off by {copy.error:.1%}."
        )
        self.reporter.notice("copy", sentence)
