"""Jobs whose forecasts are compared with measurements on a GPU: every choice that memory depends on is varied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tests.support.tiny import tiny_configs
from trainer.config.base import Family, Prediction
from trainer.config.fit import FitConfig
from trainer.config.job import PromptConfig
from trainer.config.recipe import RecipeConfig
from trainer.memory.trace.workload import BucketUse, Workload, workload_without_base

TINY = 8
"""Factor by which the images of tiny workloads are smaller."""
_LEARNED: dict[str, Any] = {"text_encoder": {"learning_rate": 1e-5}}
_BOTH: dict[str, Any] = {**_LEARNED, "text_encoder_2": {"learning_rate": 1e-5}}
_BLOCKS = ("down_blocks.2", "mid_block", "up_blocks.0")
# As many blocks as the tiny models have.
_TINY_BLOCKS = ("down_blocks.1", "mid_block", "up_blocks.0")


@dataclass(frozen=True)
class TruthJob:
    """One configuration, small enough to be a row in a table."""

    name: str
    family: Family
    size: tuple[int, int]
    pictures: int = 1
    """Images in a micro-batch."""
    micro_batches: int = 1
    recipe: Mapping[str, Any] = field(default_factory=dict)
    fit: Mapping[str, Any] = field(default_factory=dict)
    second_size: tuple[int, int] | None = None
    """Size of the images in every other step; None if all are of ``size``."""
    prediction: Prediction = "epsilon"
    after_stops: bool = False
    """Whether the run continues after its text encoders have stopped."""
    other_phases: bool = False
    """Whether caching, validation and previews are measured too."""
    gpu: str = "4090"
    """Model of the emulated GPU, where the job runs on one."""
    floor_mib: int = 0
    """MiB for PyTorch on the smallest GPU that is claimed to train this, whose context and desktop take 700 more."""

    def workload(self, *, tiny: bool = False, dtype: str = "bf16") -> Workload:
        """Return what memory depends on; with ``tiny``, of small models on images that are smaller by TINY."""
        shrink = TINY if tiny else 1
        sizes = [tuple(side // shrink for side in size) for size in (self.size, self.second_size) if size]
        width, height = sizes[0]
        batch = {"effective_batch": self.pictures * self.micro_batches}
        recipe = RecipeConfig.model_validate({"resolution": max(self.size), **self.recipe, **batch})
        workload = workload_without_base(
            self.family,
            recipe,
            FitConfig.model_validate({"dtype": dtype, "micro_batch": self.pictures, **self.fit}),
            [BucketUse(*size, 1) for size in sizes],
        )
        workload = replace(workload, prediction=self.prediction, after_stops=self.after_stops)
        if self.other_phases:
            workload = replace(workload, previews=(PromptConfig(prompt="a", width=width, height=height, steps=3),))
        return _shrunk(workload) if tiny else workload


def _shrunk(workload: Workload) -> Workload:
    configs = tiny_configs(workload.family)
    some = isinstance(workload.fit.gradient_checkpointing, tuple)
    return replace(
        workload,
        unet_config=configs["unet"],
        vae_config=configs["vae"],
        text_configs=tuple(config for name, config in configs.items() if name.startswith("text_encoder")),
        fit=workload.fit.replaced(gradient_checkpointing=_TINY_BLOCKS) if some else workload.fit,
    )


def truth_jobs() -> list[TruthJob]:
    """Return all jobs, alternating families, most different ones first, so that a shortened run covers each."""
    small, large = _jobs_of("sd15"), _jobs_of("sdxl")
    longer = max(len(small), len(large))
    return [job for place in range(longer) for jobs in (small, large) for job in jobs[place : place + 1]]


def emulated_jobs() -> list[TruthJob]:
    """Return the jobs for the emulated GPU, cheapest first; every phase of each is measured."""
    return [*_emulated_jobs_of("sd15"), *_emulated_jobs_of("sdxl")]


def _emulated_jobs_of(family: Family) -> list[TruthJob]:
    side, texts = (512, _LEARNED) if family == "sd15" else (1024, _BOTH)
    plain = TruthJob(f"{family} r16", family, (side, side), other_phases=True)
    full = _variant(plain, "full", fit={"gradient_checkpointing": "full"})
    adam8bit: dict[str, Any] = {"optimizer": {"name": "adamw8bit"}}
    tiled = {"vae_encode_tiling": True, "vae_tiling": True, "vae_dtype": "bf16"}
    nf4 = _variant(full, "nf4", fit={"quantize": "nf4"})
    stream = _variant(full, "stream", fit={"stream": "full"})
    several_texts = _variant(plain, "texts b2", pictures=2, recipe=texts)
    return [
        full,
        plain,
        _variant(full, "b2", pictures=2),
        _variant(full, "b4", pictures=4),
        _variant(plain, "blocks", fit={"gradient_checkpointing": _BLOCKS}),
        _variant(full, "r128 adamw8bit", recipe={"rank": 128, **adam8bit}),
        _variant(full, "schedulefree", recipe={"optimizer": {"name": "schedulefree"}}),
        _variant(full, "tiled bf16 VAE", fit=tiled),
        _variant(full, "preview offload", fit={"preview_offload": True}),
        _variant(full, "int8", fit={"quantize": "int8"}),
        _variant(full, "int8_products", fit={"quantize": "int8_products"}),
        nf4,
        _variant(nf4, "adamw8bit 2 micro-batches", micro_batches=2, recipe=adam8bit),
        replace(stream, floor_mib=3396 if family == "sdxl" else 0),
        _variant(stream, "int8 2 micro-batches", micro_batches=2, fit={"quantize": "int8"}),
        _variant(full, "fp16 on Turing", fit={"dtype": "fp16"}, gpu="2060"),
        _variant(full, "graphs", fit={"cuda_graphs": True}),
        _variant(full, "texts", recipe=texts),
        several_texts,
        # Flash attention splits the keys of SD 1.5 only on GPUs with many multiprocessors.
        *([_variant(several_texts, "on a 3060", gpu="3060")] if family == "sd15" else []),
        *_floors(plain, texts),
        *(_methods(full) if family == "sd15" else [_variant(full, "rectified flow", prediction="flow")]),
    ]


def _methods(full: TruthJob) -> list[TruthJob]:
    """Return jobs that differ in what is learned and how: other adapters, optimizers, schedules and datasets."""

    def optimizer(words: str, base: TruthJob = full, **settings: Any) -> TruthJob:
        return _variant(base, words, recipe={"optimizer": settings})

    texts = _variant(full, "texts", recipe=_LEARNED)
    stopping = {"steps": 100, "text_encoder": {**_LEARNED["text_encoder"], "stop_after": 50}}
    return [
        *(_variant(full, name, recipe={"adapter": name}) for name in ("loha", "lokr", "oft", "dora")),
        _variant(full, "tlora EMA", recipe={"adapter": "tlora", "ema_decay": 0.99}),
        optimizer("adan", name="other", optimizer="adan"),
        optimizer("adopt_adv", name="other", optimizer="adopt_adv"),
        optimizer("adam_mini8bit", _variant(full, "r128", recipe={"rank": 128}), name="adam_mini8bit"),
        _variant(texts, "stopped", recipe=stopping, after_stops=True),
        _variant(full, "two resolutions", second_size=(384, 384)),
        _variant(full, "prior b2", pictures=2, recipe={"objective": {"prior_prediction": True}}),
    ]


def _floors(plain: TruthJob, texts: Mapping[str, Any]) -> list[TruthJob]:
    """Return what the planner picks for the smallest GPUs that are claimed to train an unquantized base."""
    learned = _variant(plain, "stream texts", recipe=texts, fit={"stream": "full"})
    if plain.family == "sd15":
        return [replace(learned, floor_mib=2560)]
    large = _variant(plain, "full stream 1536", size=(1536, 1536), fit={"gradient_checkpointing": "full"})
    large = replace(large, fit={**large.fit, "stream": "full"})
    return [replace(job, floor_mib=7492) for job in (learned, large)]


def _variant(base: TruthJob, words: str, **changes: Any) -> TruthJob:
    for part in ("recipe", "fit"):
        changes[part] = {**getattr(base, part), **changes.get(part, {})}
    return replace(base, name=f"{base.name} {words}", **changes)


def _jobs_of(family: Family) -> list[TruthJob]:
    side = 512 if family == "sd15" else 1024
    full = {"gradient_checkpointing": "full"}
    square, tall, small = (side, side), (side * 3 // 4, side * 5 // 4), (side * 3 // 4, side * 3 // 4)
    texts = _LEARNED if family == "sd15" else _BOTH
    plain = TruthJob(f"{family} r16", family, square)
    tight = replace(plain, name=f"{family} r16 full", fit=full)

    def variant(words: str, base: TruthJob = plain, **changes: Any) -> TruthJob:
        return _variant(base, words, **changes)

    def optimizer(name: str, base: TruthJob = plain) -> TruthJob:
        rate = {"learning_rate": 1.0} if name == "prodigy" else {}
        return variant(name, base, recipe={"optimizer": {"name": name}, **rate})

    return [
        variant("all phases", tight, other_phases=True),
        plain,
        tight,
        variant("b4", tight, pictures=4),
        optimizer("adamw8bit", tight),
        variant("texts", tight, recipe=texts),
        variant("nf4", tight, fit={"quantize": "nf4"}),
        variant("2 micro-batches", micro_batches=2),
        variant("fp16", tight, fit={"dtype": "fp16"}),
        variant("attention layers", recipe={"layers": "attention"}),
        variant("convolutions", recipe={"layers": "all"}),
        variant("r128", tight, recipe={"rank": 128}),
        variant("blocks", fit={"gradient_checkpointing": _BLOCKS}),
        variant("tall", tight, size=tall),
        variant("small", size=small),
        variant("int8", tight, fit={"quantize": "int8"}),
        variant("b2", pictures=2),
        variant("fp32", tight, fit={"dtype": "fp32"}),
        optimizer("adafactor", tight),
        optimizer("prodigy", tight),
        optimizer("lion"),
        optimizer("schedulefree", tight),
        variant("r4 convolutions b2", tight, pictures=2, recipe={"rank": 4, "layers": "all"}),
        variant("texts b2", pictures=2, recipe=texts),
        variant("nf4 b2", pictures=2, fit={"quantize": "nf4"}),
        optimizer("adamw8bit", variant("r64 nf4", tight, recipe={"rank": 64}, fit={"quantize": "nf4"})),
        variant("225 tokens", tight, recipe={"token_chunks": 225}),
        variant("efficient", fit={"attention": "efficient"}),
        variant("min-SNR huber", tight, recipe={"objective": {"min_snr_gamma": 5.0, "loss": "huber"}}),
        variant("dropout", recipe={"dropout": 0.1}),
        variant("lion8bit r64", recipe={"rank": 64, "optimizer": {"name": "lion8bit"}}),
        variant("b8", tight, pictures=8),
    ]  # fmt: skip
