"""Whole runs on tiny bases: train, stop, resume, extend, refuse; the same LoRA from either form of a base."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from tests.support.jobs import overrides, photographs, write_job
from tests.support.optimizers import NAMES
from tests.support.sample import of_the_day
from tests.support.tiny import tiny_base
from trainer.adapter.export import TIME_KEYS
from trainer.base import streaming
from trainer.config.base import Family
from trainer.config.load import load_job
from trainer.dataset.sampling import Sample
from trainer.errors import LoraFileError, RunError
from trainer.protocol import commands, events, files
from trainer.protocol.report import RunReport
from trainer.protocol.run_directory import RunDirectory
from trainer.training.data.batches import BatchSchedule, CacheShard, Collator
from trainer.training.data.loader import PrefetchCollator
from trainer.training.run.resume import resume
from trainer.training.run.start import start


class Watcher:
    """Collects the events of runs, and may act at one of them."""

    def __init__(self, act: Callable[[events.Event], None] | None = None) -> None:
        self.seen: list[events.Event] = []
        self.act = act

    def __call__(self, event: events.Event) -> None:
        self.seen.append(event)
        if self.act:
            self.act(event)

    def of(self, kind: type[events.Event]) -> list[events.Event]:
        return [event for event in self.seen if isinstance(event, kind)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared files ü")
    photographs(folder / "pictures")
    return folder


def run_of(job: Path, number: int = 1, name: str = "test") -> RunDirectory:
    return RunDirectory.open(job.parent / "runs" / (name if number == 1 else f"{name}-{number}"))


def tensors_sha(path: Path) -> str:
    data = path.read_bytes()
    return hashlib.sha256(data[8 + int.from_bytes(data[:8], "little") :]).hexdigest()


def metadata(path: Path) -> dict[str, str]:
    with safetensors.safe_open(path, framework="pt") as file:
        return {key: value for key, value in file.metadata().items() if key not in TIME_KEYS}


def same_lora(first: Path, second: Path) -> bool:
    return tensors_sha(first) == tensors_sha(second) and metadata(first) == metadata(second)


def train(job: Path, settings: Sequence[str] = ()) -> Path:
    watcher = Watcher()
    assert start(job, list(settings), watcher) == 0
    (finished,) = watcher.of(events.Finished)
    assert isinstance(finished, events.Finished) and finished.outcome == "done"
    run = RunDirectory.open(max((job.parent / "runs").iterdir(), key=lambda path: path.stat().st_ctime_ns))
    assert finished.file is not None
    return run.path / finished.file


def stop_at(step: int, job: Path, name: str = "pause") -> Callable[[events.Event], None]:
    def act(event: events.Event) -> None:
        if isinstance(event, events.StepEvent) and event.step == step and event.attempt == 1:
            run = max((job.parent / "runs").iterdir(), key=lambda path: path.stat().st_ctime_ns)
            commands.send(RunDirectory.open(run).commands, name)  # type: ignore[arg-type]

    return act


@pytest.fixture(scope="module")
def undisturbed(shared: Path) -> Callable[[int], Path]:
    """The SD 1.5 LoRA of so many steps of a run to which nothing happens, for runs to which something does."""

    @cache
    def lora(steps: int) -> Path:
        job = write_job(
            shared / f"undisturbed {steps}", tiny_base("sd15", shared / "bases", depth=1), shared / "pictures"
        )
        return train(job, [f"recipe.steps={steps}"])

    return lora


def test_a_dora_is_continued_from_its_file(shared: Path) -> None:
    """Its initial magnitudes are the norms of the base's weights, which a check before loading the base lacks."""
    base = tiny_base("sd15", shared / "bases", depth=1)
    job = write_job(shared / "continued", base, shared / "pictures")
    dora = ["recipe.steps=1", "recipe.adapter=dora"]
    first = train(job, dora)
    second = train(job, [*dora, f"base.continue_from={first.as_posix()}", "recipe.learning_rate=1e-12"])
    tensors = [safetensors.torch.load_file(path) for path in (first, second)]
    assert tensors[0].keys() == tensors[1].keys()
    for key, tensor in tensors[0].items():
        torch.testing.assert_close(tensors[1][key], tensor, rtol=0, atol=1e-6)
    with pytest.raises(LoraFileError, match="contains DoRA"):
        start(job, [f"base.continue_from={first.as_posix()}"], Watcher())


def test_a_lora_whose_layers_have_different_ranks_is_continued_with_them(shared: Path, tmp_path: Path) -> None:
    """The copy of a LoHa has as many ranks as each layer needs; a resumed run has to remember them."""
    base = tiny_base("sd15", shared / "bases", depth=1)
    first = train(
        write_job(tmp_path / "first", base, shared / "pictures"),
        ["recipe.steps=2", "recipe.adapter=loha", "recipe.rank=6", "recipe.learning_rate=0.01", "output.dtype=fp32"],
    ).with_stem("test-lora")
    ranks = {
        key.partition(".")[0]: len(value)
        for key, value in safetensors.torch.load_file(first).items()
        if "lora_down" in key
    }
    assert len(set(ranks.values())) > 1
    job = write_job(tmp_path / "second", base, shared / "pictures")
    watcher = Watcher(stop_at(1, job))
    settings = ["recipe.steps=2", "recipe.learning_rate=1e-12", f"base.continue_from={first.as_posix()}"]
    assert start(job, [*settings, "output.dtype=fp32", "report.previews.prompts=[]"], watcher) == 75
    assert resume(run_of(job), watcher) == 0
    (notice,) = {event.sentence for event in watcher.of(events.Notice) if event.code == "ranks"}  # type: ignore[attr-defined]
    assert "test-lora.safetensors" in notice
    tensors = safetensors.torch.load_file(first), safetensors.torch.load_file(run_of(job).output / "test.safetensors")
    for layer, rank in ranks.items():
        products = []
        for each in tensors:
            up, down = each[f"{layer}.lora_up.weight"], each[f"{layer}.lora_down.weight"]
            assert len(down) == rank
            products.append(up.flatten(1) @ down.flatten(1) * each[f"{layer}.alpha"] / rank)
        torch.testing.assert_close(products[1], products[0], rtol=0, atol=1e-6)
    scales = {round(float(tensors[1][f"{layer}.alpha"]) / rank, 6) for layer, rank in ranks.items()}
    assert len(scales) == 1  # the recipe's


@pytest.mark.parametrize("family", ["sd15", pytest.param("sdxl", marks=pytest.mark.slow)])
def test_either_form_of_a_base_gives_the_same_lora(shared: Path, tmp_path: Path, family: str) -> None:
    loras = []
    for form in ("folder", "single"):
        base = tiny_base(family, shared / "bases", form=form)  # type: ignore[arg-type]
        job = write_job(tmp_path / form, base, shared / "pictures")
        loras.append(train(job))
    assert tensors_sha(loras[0]) == tensors_sha(loras[1])


def test_a_run_leaves_what_the_design_says(shared: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path, tiny_base("sd15", shared / "bases", depth=1), shared / "pictures")
    watcher = Watcher()
    assert start(job, [], watcher) == 0
    run = run_of(job)
    names = {path.relative_to(run.path).as_posix() for path in run.path.rglob("*") if path.is_file()}
    expected = {"job.toml", "dataset.jsonl", "run.json", "status.json", "events.jsonl"}
    expected |= {"report.json"} | {f"samples/step-{step:08d}-0.png" for step in (0, 3, 6)}
    expected |= {f"output/test-step{step:06d}.safetensors" for step in (2, 4)} | {"output/test.safetensors"}
    expected |= {"output/test.json", "output/test.png", "checkpoints/step-00000006/manifest.json"}
    assert expected <= names
    status = run.read_status()
    assert status is not None and (status.state, status.step) == ("done", 6)
    written, _ = events.read_events(run.events)
    assert [event.step for event in written if isinstance(event, events.StepEvent)] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in written if isinstance(event, events.Validation)] == [0, 3, 6]


def test_pause_and_resume_gives_the_undisturbed_lora(
    shared: Path, tmp_path: Path, undisturbed: Callable[[int], Path]
) -> None:
    base = tiny_base("sd15", shared / "bases", depth=1)
    whole = undisturbed(6)
    job = write_job(tmp_path / "b", base, shared / "pictures")
    assert start(job, [], Watcher(stop_at(3, job))) == 75
    run = run_of(job)
    assert run.read_status().state == "paused"  # type: ignore[union-attr]
    assert resume(run, Watcher()) == 0
    assert same_lora(whole, run.output / "test.safetensors")


# Each of these has a kind of state of its own; the others keep similar tensors and numbers on the CPU.
@pytest.mark.parametrize("optimizer", of_the_day(3, NAMES))
def test_every_optimizer_resumes_exactly(shared: Path, tmp_path: Path, optimizer: str) -> None:
    """Rank 64 makes tensors of 4096 elements, from which bitsandbytes keeps 8-bit state."""
    base = tiny_base("sd15", shared / "bases", depth=1)
    settings = overrides({"recipe.rank": 64, "recipe.optimizer.name": optimizer, "recipe.layers": "attention"})
    settings += ["report.previews.prompts=[]", "report.validation.timesteps=[500]", "recipe.steps=4"]
    whole = train(write_job(tmp_path / "a", base, shared / "pictures"), settings)
    job = write_job(tmp_path / "b", base, shared / "pictures")
    assert start(job, settings, Watcher(stop_at(3, job))) == 75
    run = run_of(job)
    if "8bit" in optimizer:
        saved = safetensors.torch.load_file(run.checkpoints / "step-00000003" / "optimizer.safetensors")
        assert any(tensor.dtype == torch.uint8 for tensor in saved.values())
    assert resume(run, Watcher()) == 0
    assert same_lora(whole, run.output / "test.safetensors")


LOW_PRECISION = {
    "fp16, encoders, dropout and products in int8": (
        "fit.dtype=fp16",
        "fit.quantize=int8_products",
        "recipe.text_encoder.learning_rate=1e-4",
        "recipe.dropout=0.1",
    ),
    "bf16, all that saves memory": (
        "fit.dtype=bf16",
        "fit.quantize=nf4",
        "fit.gradient_checkpointing=full",
        "recipe.optimizer.name=adamw8bit",
        "recipe.rank=64",  # tensors large enough for 8-bit state
        "recipe.layers=attention",
    ),
}


class Killed(BaseException):
    """Ends an attempt at once: nothing catches it, and nothing on the way out writes but the freeing of locks."""


def kill_at(step: int) -> Callable[[events.Event], None]:
    def act(event: events.Event) -> None:
        if isinstance(event, events.StepEvent) and event.step == step:
            raise Killed

    return act


@pytest.mark.parametrize(
    "name", [name if "bf16" in name else pytest.param(name, marks=pytest.mark.slow) for name in LOW_PRECISION]
)
def test_low_precision_killed_after_a_checkpoint_resumes_exactly(shared: Path, tmp_path: Path, name: str) -> None:
    """With our own LoRA layers, pictures put together ahead and, where the optimizer is AdamW, the fused one."""
    base = tiny_base("sdxl" if "encoders" in name else "sd15", shared / "bases", depth=1)
    settings = [*LOW_PRECISION[name], "report.previews.prompts=[]", "report.validation.timesteps=[500]"]
    settings += ["recipe.steps=3"]  # half precision is slow on CPUs
    whole = train(write_job(tmp_path / "a", base, shared / "pictures"), settings)
    job = write_job(tmp_path / "b", base, shared / "pictures")
    with pytest.raises(Killed):
        start(job, settings, Watcher(kill_at(3)))
    run = run_of(job)
    (saved,) = [folder for folder in run.checkpoints.iterdir() if folder.name != "step-00000000"]
    state = safetensors.torch.load_file(saved / "optimizer.safetensors")
    assert saved.name == "step-00000002"  # the third step is done again
    assert any(tensor.dtype == torch.uint8 for tensor in state.values()) == ("8bit" in " ".join(settings))
    assert bool(load_job(run.job).fit.int8_products) == ("int8" in name)  # frozen with the run, which says so
    told = [event for event in events.read_events(run.events)[0] if getattr(event, "code", "") == "int8_products"]
    assert len(told) == ("int8" in name)
    taught: list[RunReport] = []
    assert resume(run, Watcher(), learn=taught.append) == 0
    assert len(taught) == ("int8" not in name)  # whose forecast is an estimate
    assert same_lora(whole, run.output / "test.safetensors")


def test_loader_size_and_a_kill_with_batches_in_advance_change_nothing(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the kill, the loader is several steps ahead of the checkpoint; the resumed run prefetches with other sizes."""
    base = tiny_base("sd15", shared / "bases", depth=1)
    settings = ["recipe.images.crop=random", "recipe.captions.shuffle=true", "report.previews.prompts=[]"]
    alone = [*settings, "fit.loader_workers=1", "fit.prefetch_batches=1"]
    whole = train(write_job(tmp_path / "a", base, shared / "pictures"), alone)
    job = write_job(tmp_path / "b", base, shared / "pictures")
    with pytest.raises(Killed):
        start(job, [*settings, "fit.loader_workers=5", "fit.prefetch_batches=9"], Watcher(kill_at(3)))
    assert (run_of(job).checkpoints / "step-00000002").is_dir()
    monkeypatch.setattr("trainer.training.recovery.engine_manager.PrefetchCollator", AnotherSize)
    assert resume(run_of(job), Watcher()) == 0
    assert tensors_sha(whole) == tensors_sha(run_of(job).output / "test.safetensors")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("loader", "reader"))]


class AnotherSize(PrefetchCollator):
    """A loader with two threads and three batches in advance, whatever the job says."""

    def __init__(self, assembler: Collator, *others: Any) -> None:
        fit = assembler.job.fit.replaced(loader_workers=2, prefetch_batches=3)
        job = assembler.job.replaced(fit=fit)
        super().__init__(Collator(job, assembler.source, assembler.cache, live_text=assembler.live_text), *others)


@pytest.mark.parametrize("family", ["sd15", pytest.param("sdxl", marks=pytest.mark.slow)])
def test_a_streamed_run_that_was_killed_ends_with_the_lora_of_a_resident_one(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: Family
) -> None:
    """All weights are streamed, so that most of the tiny base has no memory between steps."""
    monkeypatch.setattr(streaming, "MIN_BYTES", 0)
    base = tiny_base(family, shared / "bases", depth=1)
    settings = ["recipe.steps=3", "report.previews.prompts=[]", "report.validation.timesteps=[500]"]
    resident = train(write_job(tmp_path / "a", base, shared / "pictures"), settings)
    job = write_job(tmp_path / "b", base, shared / "pictures")
    with pytest.raises(Killed):
        start(job, [*settings, "fit.stream=full", "fit.gradient_checkpointing=full"], Watcher(kill_at(3)))
    run = run_of(job)
    assert not (run.checkpoints / "step-00000003").exists()  # the third step is done again
    assert load_job(run.job).fit.stream == "full"
    assert resume(run, Watcher()) == 0
    assert tensors_sha(resident) == tensors_sha(run.output / "test.safetensors")


def test_a_streamed_run_copies_its_rotations_as_a_resident_one(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy as a plain LoRA depends on the base's weights, which are in memory only while their block runs."""
    monkeypatch.setattr(streaming, "MIN_BYTES", 0)
    base = tiny_base("sd15", shared / "bases", depth=1)
    settings = ["recipe.steps=1", "recipe.adapter=oft", "report.validation.timesteps=[500]"]
    settings.append("recipe.text_encoder.learning_rate=1e-4")
    resident = train(write_job(tmp_path / "a", base, shared / "pictures"), settings)
    streamed = train(write_job(tmp_path / "b", base, shared / "pictures"), [*settings, "fit.stream=full"])
    assert tensors_sha(resident) == tensors_sha(streamed)
    assert tensors_sha(resident.with_stem("test-lora")) == tensors_sha(streamed.with_stem("test-lora"))


def test_stop_exports_and_the_run_can_be_extended(
    shared: Path, tmp_path: Path, undisturbed: Callable[[int], Path]
) -> None:
    base = tiny_base("sd15", shared / "bases", depth=1)
    job = write_job(tmp_path / "b", base, shared / "pictures")
    assert start(job, [], Watcher(stop_at(3, job, "stop"))) == 75
    run = run_of(job)
    assert (run.output / "test-step000003.safetensors").exists()
    assert resume(run, Watcher(), steps=8) == 0
    longer = undisturbed(8)
    assert tensors_sha(longer) == tensors_sha(run.output / "test.safetensors")


def test_a_finished_run_can_be_extended(shared: Path, tmp_path: Path, undisturbed: Callable[[int], Path]) -> None:
    base = tiny_base("sd15", shared / "bases", depth=1)
    job = write_job(tmp_path / "b", base, shared / "pictures")
    train(job)
    run = run_of(job)
    finished = tensors_sha(run.output / "test.safetensors")
    assert resume(run, Watcher(), steps=8, schedule="restart") == 0
    longer = undisturbed(8)
    assert tensors_sha(longer) == tensors_sha(run.output / "test.safetensors")  # the schedule is constant
    kept = run.output / "test-step000006.safetensors"
    assert tensors_sha(kept) == finished and metadata(kept)["ss_output_name"] == "test-step000006"
    assert same_lora(kept, longer.with_name(kept.name))  # where the longer run saves every second step anyway


def test_what_was_finished_is_kept_beside_a_limit_of_files_and_a_lost_checkpoint(shared: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path, tiny_base("sd15", shared / "bases", depth=1), shared / "pictures")
    settings = ["report.saving.every_steps=4", "report.saving.keep=1", "recipe.layers=attention"]
    settings += ["report.validation.every=100"]  # the best step would be kept too
    finished = train(job, ["recipe.steps=5", *settings, "report.previews.prompts=[]"])
    before = tensors_sha(finished)
    run = run_of(job)
    (run.checkpoints / "step-00000005" / "state.json").unlink()
    assert resume(run, Watcher(), steps=9) == 0
    assert tensors_sha(run.output / "test-step000005.safetensors") == before != tensors_sha(finished)
    assert {path.name for path in run.output.iterdir()} == {
        f"{stem}.{ending}"
        for stem in ("test", "test-step000005", "test-step000008")
        for ending in ("safetensors", "json")
    }


def killed_at_the_job(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Does something that is killed when it is about to write a job.toml."""
    write = files.write_text

    def kill(target: Path, text: str, **how: bool) -> None:
        if target.name == "job.toml":
            raise Killed
        write(target, text, **how)

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_text", kill)
        with pytest.raises(Killed):
            act()


def test_a_kill_before_the_extended_job_is_written_loses_no_length(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Callable[[int], Path]
) -> None:
    base = tiny_base("sd15", shared / "bases", depth=1)
    job = write_job(tmp_path / "b", base, shared / "pictures")
    assert start(job, [], Watcher(stop_at(3, job))) == 75
    run = run_of(job)
    killed_at_the_job(monkeypatch, lambda: resume(run, Watcher(), steps=8))
    assert run.attempts()[-1]["job"]["recipe.steps"] == 8  # type: ignore[index]
    assert "steps = 6" in run.job.read_text(encoding="utf-8")
    assert resume(run, Watcher()) == 0
    longer = undisturbed(8)
    assert same_lora(longer, run.output / "test.safetensors")


def test_a_run_killed_before_its_job_was_written_says_to_start_again(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = write_job(tmp_path / "b", tiny_base("sd15", shared / "bases", depth=1), shared / "pictures")
    killed_at_the_job(monkeypatch, lambda: start(job, [], Watcher()))
    with pytest.raises(RunError, match="never started") as refused:
        resume(run_of(job), Watcher())
    assert refused.value.code == "run.empty"
    assert train(job).parents[1].name == "test-2"


def test_resume_refuses_a_changed_job(shared: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path / "b", tiny_base("sd15", shared / "bases", depth=1), shared / "pictures")
    assert start(job, [], Watcher(stop_at(3, job))) == 75
    run = run_of(job)
    run.job.write_text(run.job.read_text(encoding="utf-8").replace("alpha = 2.0", "alpha = 4.0"), encoding="utf-8")
    with pytest.raises(RunError) as refused:
        resume(run, Watcher())
    assert refused.value.code == "run.job_changed"


def test_resume_names_what_a_damaged_history_does_not_state(shared: Path, tmp_path: Path) -> None:
    """Found while resuming, not hours later when the LoRA is saved, which needs `started`."""
    job = write_job(tmp_path / "b", tiny_base("sd15", shared / "bases", depth=1), shared / "pictures")
    assert start(job, [], Watcher(stop_at(3, job))) == 75
    run = run_of(job)
    record = json.loads(run.run.read_text(encoding="utf-8"))
    for key in ("started", "job", "base", "listing", "segments"):
        (attempt,) = record["attempts"]
        for wrong in ({}, {key: 5 if key != "started" else "5"}, {key: [] if key == "segments" else None}):
            rest = {name: value for name, value in attempt.items() if name != key}
            run.run.write_text(json.dumps(record | {"attempts": [rest | wrong]}), encoding="utf-8")
            with pytest.raises(RunError) as refused:
                resume(run, Watcher())
            assert refused.value.code == "run.damaged", (key, wrong)
            assert key in refused.value.sentence or key == "segments", refused.value.sentence


def test_resume_refuses_a_changed_base(shared: Path, tmp_path: Path) -> None:
    base = tiny_base("sd15", tmp_path / "bases", form="single")
    job = write_job(tmp_path / "b", base, shared / "pictures")
    assert start(job, [], Watcher(stop_at(3, job))) == 75
    tiny_base("sd15", tmp_path / "other", form="single", seed=1).replace(base)
    with pytest.raises(RunError) as refused:
        resume(run_of(job), Watcher())
    assert refused.value.code == "run.base_changed"


def test_a_damaged_checkpoint_is_passed_over(shared: Path, tmp_path: Path, undisturbed: Callable[[int], Path]) -> None:
    base = tiny_base("sd15", shared / "bases", depth=1)
    whole = undisturbed(6)
    job = write_job(tmp_path / "b", base, shared / "pictures")
    assert start(job, [], Watcher(stop_at(3, job))) == 75
    run = run_of(job)
    damaged = run.checkpoints / "step-00000003" / "adapter.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x7f")
    watcher = Watcher()
    assert resume(run, watcher) == 0
    codes = [event.code for event in watcher.of(events.Notice)]  # type: ignore[attr-defined]
    assert codes == ["checkpoint.damaged", "best", "report"]
    assert same_lora(whole, run.output / "test.safetensors")


def test_a_damaged_cache_entry_is_made_anew(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("IMPASTO_CACHE", str(cache))
    base = tiny_base("sd15", shared / "bases", depth=1)
    whole = train(write_job(tmp_path / "a", base, shared / "pictures"))
    for entry in cache.rglob("*.safetensors"):
        data = bytearray(entry.read_bytes())
        data[-1] ^= 0xFF
        entry.write_bytes(data)
    again = train(write_job(tmp_path / "b", base, shared / "pictures"))
    assert same_lora(whole, again)


@pytest.mark.parametrize(
    ("gigabytes", "ends"),
    [(1e-9, [0, 1, 2, 3, 4, 5]), (8e-5, [1, 3, 5])],
    ids=["below one step", "one epoch"],
)
def test_cache_shards_change_nothing(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gigabytes: float, ends: list[int]
) -> None:
    """Two steps per epoch; what earlier shards wrote makes room for the next, and a resumed run starts in an epoch."""
    base = tiny_base("sd15", shared / "bases", depth=1)
    settings = ["recipe.images.crop=random", "recipe.captions.shuffle=true", "report.previews.prompts=[]"]
    settings += ["report.saving.checkpoint_every=1"]
    whole = train(write_job(tmp_path / "a", base, shared / "pictures"), settings)
    listed: list[CacheShard] = []
    list_shard = BatchSchedule._list_shard

    def recorded(schedule: BatchSchedule, first: int) -> tuple[CacheShard, list[Sample]]:
        shard, samples = list_shard(schedule, first)
        listed.append(shard)
        return shard, samples

    monkeypatch.setattr(BatchSchedule, "_list_shard", recorded)
    monkeypatch.setenv("IMPASTO_CACHE", str(tmp_path / "cache"))
    job = write_job(tmp_path / "b", base, shared / "pictures")
    with pytest.raises(Killed):
        start(job, [*settings, f"fit.cache_gigabytes={gigabytes}"], Watcher(kill_at(4)))
    assert [shard.last for shard in listed] == [end for end in ends if end <= 3]
    written = list((tmp_path / "cache" / "pictures").rglob("*.safetensors"))
    assert len(written) <= 12  # the last epoch's six images, and the six that are measured
    listed.clear()
    assert resume(run_of(job), Watcher()) == 0
    assert [shard.last for shard in listed] == [end for end in ends if end >= 3] and listed[0].first == 3
    assert tensors_sha(whole) == tensors_sha(run_of(job).output / "test.safetensors")


def test_a_preview_holds_its_settings(shared: Path, tmp_path: Path) -> None:
    from PIL import Image

    job = write_job(tmp_path, tiny_base("sdxl", shared / "bases", depth=1), shared / "pictures")
    train(job)
    with Image.open(run_of(job).samples / "step-00000003-0.png") as picture:
        assert picture.size == (64, 64)
        settings = json.loads(picture.text["impasto"])  # type: ignore[attr-defined]
        assert settings["prompt"] == "sks, a cat" and settings["step"] == 3
        assert "Seed: 1" in picture.text["parameters"]  # type: ignore[attr-defined]
