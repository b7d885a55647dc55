"""The phases' tapes against real runs on the CPU, against figures measured by others, and against each other."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from typing import Any, cast

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from diffusers import AutoencoderKL
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from numpy.random import default_rng
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.support.tiny import Family, tiny_configs, tiny_models
from trainer.adapter.attach import attach
from trainer.base.drawing import RenderSpec, decode_levels, draw_latents, make_sampler
from trainer.base.encoding import TextConditioning, encode_latents, encode_texts, posterior
from trainer.config.fit import FitConfig
from trainer.config.job import PromptConfig
from trainer.config.methods import SAMPLERS
from trainer.config.optimizers.kinds import ScheduleFreeConfig
from trainer.config.recipe import RecipeConfig, TextEncoderConfig
from trainer.memory.allocator.allocator import Allocator
from trainer.memory.allocator.replay import SurvivingStorage, replay
from trainer.memory.trace import other_phases, recorder
from trainer.memory.trace.memory_trace import MemoryTrace, totals
from trainer.memory.trace.meta_models import bare_unet, empty_engine, micro_batch
from trainer.memory.trace.workload import BucketUse, Workload, workload_without_base
from trainer.training.callbacks.validation import losses_of_image
from trainer.training.objective import NoiseSchedule
from trainer.training.step import MicroBatch, StepModels

MIB = 2**20
CPU = FitConfig(dtype="fp32", attention="math")


def recipe(family: Family, resolution: int, **settings: Any) -> RecipeConfig:
    """As resolve_job leaves one, where memory depends on it."""
    wanted = RecipeConfig(**{"rank": 16} | settings, resolution=resolution, steps=100, conv_rank=16, layers="linear")
    encoders = {name: getattr(wanted, name).replaced(rank=16) for name in ("text_encoder", "text_encoder_2")}
    return wanted.replaced(clip_skip=1 if family == "sd15" else None, **encoders)


def subject(family: Family, resolution: int, fit: FitConfig | None = None, **settings: Any) -> Workload:
    """A full-size base with one preview at its resolution."""
    made = workload_without_base(family, recipe(family, resolution, **settings), fit)
    return replace(made, previews=(PromptConfig(prompt="a cat", steps=20, width=resolution, height=resolution),))


def tiny(family: Family, fit: FitConfig | None = None, **settings: Any) -> Workload:
    """The same on a tiny base, at 64 pixels."""
    configs = tiny_configs(family)
    texts = tuple(config for part, config in configs.items() if part.startswith("text_encoder"))
    made = subject(family, 64, fit or CPU, **settings)
    return replace(made, unet_config=configs["unet"], vae_config=configs["vae"], text_configs=texts)


def peaks(tapes: tuple[MemoryTrace, ...]) -> tuple[float, float]:
    """MiB handed out and taken at most; with cuBLAS' workspace, as on the cards of the figures."""
    allocator = Allocator()
    replay(tapes, allocator, {}, lambda storage: storage.bytes if storage.module == "cublas" else 0)
    return allocator.peak_allocated / MIB, allocator.peak_reserved / MIB


# Against figures of others: reference measurements of a prototype, for SDXL's VAE at 1024 by 1024


@pytest.mark.parametrize(("dtype", "allocated", "reserved"), [("bf16", 1451, 1728), ("fp32", 2893, 3444)])
def test_encoding_takes_what_is_known_of_it(dtype: Any, allocated: int, reserved: int) -> None:
    tapes = other_phases.cache_pictures(subject("sdxl", 1024, FitConfig(vae_dtype=dtype)))
    assert peaks(tapes) == pytest.approx((allocated, reserved), rel=2e-3)


def test_encoding_in_tiles_takes_what_its_largest_tile_does() -> None:
    """A quarter of the pixels, beside the same weights."""
    tiled = peaks(
        other_phases.cache_pictures(subject("sdxl", 1024, FitConfig(vae_dtype="bf16", vae_encode_tiling=True)))
    )
    assert tiled[0] < 0.35 * 1451 and tiled[1] < 0.45 * 1728


@pytest.mark.parametrize(
    ("dtype", "tiling", "allocated", "reserved"),
    [("bf16", False, 1709, 2942), ("bf16", True, 563, 866), ("fp32", False, 3401, 5880)],
)
def test_decoding_takes_what_is_known_of_it(dtype: Any, tiling: bool, allocated: int, reserved: int) -> None:
    wanted = subject("sdxl", 1024, FitConfig(vae_dtype=dtype, vae_tiling=tiling))
    _, decoded, _ = other_phases.preview(replace(wanted, unet_config=tiny_configs("sdxl")["unet"]))
    assert peaks((decoded,)) == pytest.approx((allocated, reserved), rel=2e-3)


@pytest.mark.parametrize(("dtype", "gibibytes"), [("bf16", 1.525), ("fp32", 3.05)])
def test_sdxls_text_encoders_take_what_is_known_of_them(dtype: Any, gibibytes: float) -> None:
    (tape,) = other_phases.cache_texts(subject("sdxl", 1024, FitConfig(dtype=dtype)))
    assert of_kind(tape, "weights") / 2**30 == pytest.approx(gibibytes, rel=3e-3)


def of_kind(tape: MemoryTrace, kind: str) -> int:
    return sum(storage.bytes for storage in tape.storages if storage.kind == kind)


# Against real runs on the CPU: what lives at most, byte for byte


class Live(TorchDispatchMode):
    """Counts the bytes of real storages born inside, now and at most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self.known | given:
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        self.known.add(storage._cdata)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, name: int, size: int) -> None:
        self.known.discard(name)
        self.now -= size


def most_alive(work: Callable[[], object]) -> int:
    """Bytes that ``work`` needs at most beyond what lived before it, with the attention that the CPU and meta share."""
    with sdpa_kernel([SDPBackend.MATH]), Live() as live:
        work()
        most: int = live.most
    return most


def stage_peak(tape: MemoryTrace, stage: str) -> int:
    """How far memory rises within a stage above where it stood when that began; workspaces are not the trace's."""
    sizes = [0 if storage.kind == "workspace" else storage.bytes for storage in tape.storages]
    live, began, most = 0, None, 0
    for event in tape.events.tolist():
        index = event if event >= 0 else ~event
        if event >= 0 and tape.storages[index].stage == stage:
            began = live if began is None else began
            most = max(most, live + sizes[index] - began)
        live += sizes[index] if event >= 0 else -sizes[index]
    return most


@pytest.fixture
def as_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a trace compute attention as the CPU does, and leave out what only a card's kernels take inside."""
    monkeypatch.setattr(other_phases, "VAE_ATTENTION", "math")
    monkeypatch.setattr(other_phases, "attention_kernel", lambda *_: "math")
    monkeypatch.setattr(recorder, "hidden_bytes", lambda *_: ())
    monkeypatch.delitem(recorder._REPLACEMENTS, torch.ops.aten._safe_softmax.default)


@cache
def with_adapter(family: Family) -> UNet2DConditionModel:
    """A real tiny UNet with the adapter that the traced one has."""
    unet = cast(UNet2DConditionModel, UNet2DConditionModel.from_config(tiny_configs(family)["unet"]))
    attach(family, unet.eval(), (), tiny(family).recipe, dtype=torch.float32, generator=lambda _: default_rng(0))
    return unet


def text_of(family: Family) -> TextConditioning:
    text = micro_batch(tiny(family), (64, 64), 1).text
    assert text is not None
    return text


FAMILIES = pytest.mark.parametrize("family", ["sd15", "sdxl"])


@FAMILIES
@pytest.mark.usefixtures("as_on_the_cpu")
def test_encoding_pictures_against_the_cpu(family: Family) -> None:
    (tape,) = other_phases.cache_pictures(tiny(family))
    vae = cast(Any, tiny_models(family)["vae"])
    # On a card the pixels are moved; here they are born as a copy, which takes as much and lives as long.
    real = most_alive(lambda: posterior(vae, torch.zeros(1, 3, 64, 64).clone()))
    assert stage_peak(tape, "encode 64x64") == real


@pytest.mark.usefixtures("as_on_the_cpu")
def test_encoding_again_in_fp32_takes_what_an_fp32_vae_does() -> None:
    """The guard against numbers that are not finite, of a 16-bit VAE; the weights, too, are counted."""
    (tape,) = other_phases.cache_pictures(tiny("sd15"))
    pixels = torch.full((1, 3, 64, 64), 3e5)  # past fp16's largest number
    source = tiny_models("sd15")["vae"].state_dict()
    with sdpa_kernel([SDPBackend.MATH]), Live() as live:
        vae = cast(Any, AutoencoderKL.from_config(tiny_configs("sd15")["vae"])).eval().requires_grad_(False)
        vae.load_state_dict(source)
        torch.nn.Module.to(vae, torch.float16)
        live.most = live.now
        mean, _ = encode_latents(vae, pixels)
    assert mean.isfinite().all()
    first = 2 * mean.nbytes + 1  # what the first try left: mean, deviation, and whether they are finite
    moved = pixels.nbytes  # to a card; here they are in fp32 already
    assert live.most + moved == of_kind(tape, "weights") + stage_peak(tape, "encode 64x64") + first


@FAMILIES
@pytest.mark.parametrize("side", [64, 640])
@pytest.mark.usefixtures("as_on_the_cpu")
def test_decoding_in_tiles_against_the_cpu(family: Family, side: int) -> None:
    """At 640 pixels there are four tiles."""
    prompt = PromptConfig(prompt="a cat", steps=1, width=side, height=side)
    wanted = replace(tiny(family, CPU.replaced(vae_tiling=True)), previews=(prompt,))
    _, tape, _ = other_phases.preview(wanted)
    vae = cast(Any, tiny_models(family)["vae"])
    latents = torch.zeros(1, 4, side // 8, side // 8)
    assert stage_peak(tape, f"decode {side}x{side}") == most_alive(lambda: decode_levels(vae, latents, tiling=True))


@FAMILIES
@pytest.mark.parametrize(
    ("deterministic", "texts", "weighted", "by_captions"),
    [(True, 1, False, False), (False, 8, False, False), (False, 8, True, True), (False, 8, True, False)],
)
@pytest.mark.usefixtures("as_on_the_cpu")
def test_encoding_texts_against_the_cpu(
    family: Family, deterministic: bool, texts: int, weighted: bool, by_captions: bool
) -> None:
    subject = tiny(family, CPU.replaced(deterministic=deterministic))
    prompts = (PromptConfig(prompt="a (cat)", weights=True),) if weighted and not by_captions else ()
    recipe = subject.recipe.replaced(weighted_captions=weighted and by_captions)
    (tape,) = other_phases.cache_texts(replace(subject, recipe=recipe, previews=prompts))
    encoders = [cast(Any, model) for part, model in tiny_models(family).items() if part.startswith("text")]
    real = most_alive(lambda: encode_texts(family, encoders, [""] * texts, 1, torch.device("cpu"), weighted=weighted))
    ids = texts * 77 * 8  # moved to a card, where they are already on the CPU
    weights = texts * 77 * 4 if weighted else 0
    assert stage_peak(tape, "texts") == real + ids * len(encoders) + weights


@FAMILIES
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.usefixtures("as_on_the_cpu")
def test_drawing_against_the_cpu(family: Family, sampler: Any) -> None:
    prompt = PromptConfig(prompt="a cat", steps=other_phases.STEPS_DRAWN, sampler=sampler, width=64, height=64)
    tape, _, _ = other_phases.preview(replace(tiny(family), previews=(prompt,)))
    text = text_of(family)
    drawing = RenderSpec(prompt, 64, 64, text, text)
    made, unet = make_sampler(sampler, "epsilon", zero_terminal_snr=False), with_adapter(family)
    real = most_alive(lambda: draw_latents(family, unet, made, drawing, lambda *_: None))
    moved = 2 * (text.hidden.nbytes + (0 if text.pooled is None else text.pooled.nbytes))
    # Samplers compute with single numbers in main memory, which the card does not see.
    assert stage_peak(tape, "draw 64x64") == pytest.approx(real + moved, abs=64)


@FAMILIES
@pytest.mark.usefixtures("as_on_the_cpu")
def test_validation_against_the_cpu(family: Family) -> None:
    wanted = tiny(family, CPU.replaced(micro_batch=2))
    (tape,) = other_phases.validate(wanted)
    models = StepModels(family, with_adapter(family), (), None, torch.float32)
    schedule = NoiseSchedule.create("epsilon", False).to("cpu", torch.float32)

    batch = replace(micro_batch(wanted, (64, 64), 2), input_noise=None, mask=None)
    cpu = torch.device("cpu")
    real = most_alive(lambda: losses_of_image(models, schedule, (copied(one) for one in [batch]), cpu))
    assert stage_peak(tape, "validate 64x64") == real


def copied(batch: MicroBatch) -> MicroBatch:
    """As large and as new as what is moved to a card."""
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    text = TextConditioning(batch.text.hidden.clone(), batch.text.pooled) if batch.text else None
    if text and text.pooled is not None:
        text.pooled = text.pooled.clone()
    return MicroBatch(**tree_map_only(Tensor, torch.clone, values) | {"text": text})


# What lives, and for how long


def played(*parts: tuple[MemoryTrace, ...]) -> tuple[dict[str, SurvivingStorage], list[int]]:
    """What is left after some phases, by name, and the bytes handed out at most in each tape."""
    names: dict[str, SurvivingStorage] = {}
    allocator = Allocator()
    most = []
    for tape in (tape for tapes in parts for tape in tapes):
        done = replay([tape], allocator, names, lambda _: 0).played[0]
        most.append(int(done.allocated.max(initial=0)))
        allocator.empty_cache()
    return names, most


@pytest.mark.parametrize(("dtype", "ema"), [("fp32", None), ("bf16", None), ("bf16", 0.99)])
def test_loading_takes_the_weights_and_nothing_else(dtype: Any, ema: float | None) -> None:
    trained = TextEncoderConfig(learning_rate=1e-4, rank=16)
    wanted = tiny("sdxl", FitConfig(dtype=dtype), text_encoder=trained, ema_decay=ema)
    (tape,) = other_phases.load(wanted)
    size = 4 if dtype == "fp32" else 2
    models = tiny_models("sdxl")
    base = sum(w.numel() for part in ("unet", "text_encoder", "text_encoder_2") for w in models[part].parameters())
    assert of_kind(tape, "weights") == size * base + 77 * 8 * 2 + 4 * 1000 * 4  # position ids, the noise schedule
    engine = empty_engine(wanted)
    copies = size + 4 + (4 if ema else 0)  # working weights, master weights and their moving average
    assert of_kind(tape, "adapter") == copies * sum(w.numel() for w in engine.adapter.parameters.values())
    assert of_kind(tape, "temporary") == 0 and (tape.events >= 0).all()
    # The order is that of the UNet's own parameters, then the encoders', then the adapter's.
    first = [storage.module for storage in tape.storages]
    assert first[:2] == ["unet.conv_in"] * 2
    parts = list(dict.fromkeys(module.split(".")[0] for module in first[:-8]))
    assert parts[:3] == ["unet", "text_encoder", "text_encoder_2"]


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8.0), ("nf4", 4 + 8 / 64 + 32 / (64 * 256))])
def test_quantizing_needs_one_weight_in_16_bits_at_a_time(kind: Any, bits: float) -> None:
    """int8 keeps a scale for each row; NF4 a byte for each 64 weights, and a scale for each 256 of those."""
    wanted = subject("sd15", 512, FitConfig(quantize=kind))
    assert other_phases.load(wanted) == ()
    (tape,) = other_phases.quantise(wanted)
    unet, *_ = bare_unet(wanted)
    layers = [layer for layer in unet.modules() if type(layer).__name__.startswith("Frozen")]
    numbers = [cast(Any, layer).in_features * cast(Any, layer).out_features for layer in layers]
    others = sum(weight.numel() for weight in unet.parameters()) - sum(numbers)
    scales = sum(4 * cast(Any, layer).out_features for layer in layers) if kind == "int8" else 0
    expected = sum(numbers) * bits / 8 + scales + 2 * others
    assert of_kind(tape, "weights") == pytest.approx(expected, rel=1e-3)
    assert max(storage.bytes for storage in tape.storages if storage.kind == "temporary") == 2 * max(numbers)
    # At no time is more there than what stays in the end and one weight in 16 bits.
    assert totals(tape).peak <= totals(tape).net + 2 * max(numbers)


def test_tracing_leaves_quantizing_intact() -> None:
    other_phases.quantise(tiny("sdxl", FitConfig(dtype="fp32", quantize="nf4")))
    weight = torch.randn(64, 64)
    restored = dequantize_4bit(*quantize_4bit(weight, quant_type="nf4", compress_statistics=True))
    assert (restored - weight).abs().mean() < 0.1


@FAMILIES
def test_caching_ends_with_nothing_left_and_no_unet_in_it(family: Family) -> None:
    wanted = tiny(family)
    tapes = (*other_phases.cache_pictures(wanted), *other_phases.cache_texts(wanted))
    names, _ = played(tapes)
    assert set(names) <= {"cublas.caller"}
    assert not any(storage.module.startswith("unet") for tape in tapes for storage in tape.storages)


def test_texts_are_not_cached_where_encoders_learn() -> None:
    assert other_phases.cache_texts(tiny("sd15", text_encoder=TextEncoderConfig(learning_rate=1e-4, rank=4))) == ()


def test_every_shape_is_encoded_once_and_the_largest_measured() -> None:
    buckets = (BucketUse(96, 64, 3), BucketUse(64, 64, 2))
    wanted = replace(tiny("sd15"), buckets=buckets, validation_buckets=(BucketUse(128, 128, 1), BucketUse(64, 64, 1)))
    stages = {storage.stage for storage in other_phases.cache_pictures(wanted)[0].storages}
    assert stages == {"load", "encode 96x64", "encode 64x64", "encode 128x128"}
    assert {storage.stage for storage in other_phases.validate(wanted)[0].storages} == {"validate 128x128"}


def test_the_unet_makes_room_for_decoding_and_returns() -> None:
    staying, leaving = (tiny("sdxl", CPU.replaced(preview_offload=offload)) for offload in (False, True))
    loaded = other_phases.load(staying)
    before, plain = played(loaded, other_phases.preview(staying))
    after, roomy = played(loaded, other_phases.preview(leaving))
    unet = sum(weight.nbytes for weight in empty_engine(staying).models.unet.parameters())
    assert plain[2] - roomy[2] == pytest.approx(unet, rel=0.01)  # beside what the allocator rounds
    assert before.keys() == after.keys()
    assert {name: kept.storage.bytes for name, kept in before.items()} == {
        name: kept.storage.bytes for name, kept in after.items()
    }
    # As often as wished.
    played(loaded, *[other_phases.preview(leaving)] * 2)


def test_previews_by_encoders_that_learn_encode_their_texts() -> None:
    wanted = tiny("sd15", text_encoder=TextEncoderConfig(learning_rate=1e-4, rank=4))
    assert any(storage.stage == "texts" for storage in other_phases.preview(wanted)[0].storages)
    assert not any(storage.stage == "texts" for storage in other_phases.preview(tiny("sd15"))[0].storages)


def test_the_work_of_previews_is_that_of_all_prompts_and_steps() -> None:
    def flops(*prompts: PromptConfig) -> tuple[int, int]:
        tapes = other_phases.preview(replace(tiny("sd15"), previews=prompts))
        return tuple(sum(item.flops * item.count for item in tape.work) for tape in tapes[:2])  # type: ignore[return-value]

    one = PromptConfig(prompt="a", steps=2, width=64, height=64)
    few = flops(one)
    many = flops(one.replaced(steps=12), one.replaced(steps=8, seed=3))
    assert many == (10 * few[0], 2 * few[1])


def test_saving_takes_nothing_but_where_weights_are_averaged() -> None:
    for tapes in (other_phases.checkpoint(tiny("sd15")), other_phases.save(tiny("sd15"))):
        assert totals(tapes[0]).peak == 0
    averaged = tiny("sd15", optimizer=ScheduleFreeConfig())
    (tape,) = other_phases.save(averaged)
    masters = 4 * sum(weight.numel() for weight in empty_engine(averaged).adapter.parameters.values())
    assert (totals(tape).net, of_kind(tape, "temporary")) == (0, masters)
    assert of_kind(other_phases.validate(averaged)[0], "temporary") > masters
