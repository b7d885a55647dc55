"""What a trace says of training steps against what real steps on the CPU do."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.support.cpu_steps import (
    cpu_engine,
    outside_kernels,
    real_micro_batch,
    real_steps,
    tensors_of,
    tiny_workload,
    traced_bytes,
)
from tests.support.optimizers import NAMES
from tests.support.sample import of_the_day
from tests.support.traced_steps import StepTraces, trace_steps
from trainer.adapter.attach import initial_weights
from trainer.config.base import Family
from trainer.config.fit import FitConfig
from trainer.config.recipe import RecipeConfig
from trainer.memory.trace import meta_models
from trainer.memory.trace import recorder as tracer
from trainer.memory.trace.derive import join, scale
from trainer.memory.trace.library import TraceLibrary
from trainer.memory.trace.memory_trace import MemoryTrace
from trainer.memory.trace.meta_models import empty_engine, label_engine, lasting_tensors, micro_batch
from trainer.memory.trace.recorder import recording
from trainer.memory.trace.store import TraceStore
from trainer.memory.trace.train_step import trace_micro, trace_optimizer
from trainer.memory.trace.workload import TracePart, TraceRequest, Workload, workload_without_base
from trainer.training import engine as engine_module
from trainer.training.engine import Engine
from trainer.training.optim.master_weights import measure
from trainer.training.optim.optimizer import set_learning_rates

Size = tuple[int, int]
Options = Mapping[str, Any]

BUCKET = (64, 64)
TEXT = {"text_encoder": {"learning_rate": 1e-4}, "text_encoder_2": {"learning_rate": 1e-4}}
SCHEDULED = {"loss": "smooth_l1", "huber_schedule": "snr", "min_snr_gamma": 5.0, "v_pred_like_loss": 0.5}
MASKED = {"objective": {"loss": "huber", "input_perturbation": 0.1}}
SETTINGS: list[tuple[Family, int, Options, Options]] = [
    ("sd15", 1, {"layers": "attention"}, {}),
    ("sd15", 2, {"layers": "all", "objective": SCHEDULED}, {}),
    ("sd15", 2, {**TEXT, **MASKED}, {"gradient_checkpointing": ["down_blocks.0", "mid_block"]}),
    ("sd15", 2, {}, {"quantize": "int8"}),
    ("sd15", 2, {}, {"quantize": "int8_products"}),
    ("sdxl", 1, {}, {"gradient_checkpointing": "full"}),
    ("sdxl", 2, {**TEXT, "token_chunks": 150, "ema_decay": 0.9}, {}),
    ("sd15", 1, {"layers": "all", "max_weight_norm": 1e-6, "lora_plus_ratio": 16.0}, {}),
    ("sdxl", 1, {"blocks": [{"match": "*.to_q", "rank": 3}, {"match": "unet.mid_block.*", "rate_factor": 0.0}]}, {}),
    ("sdxl", 3, {"max_grad_norm": 0.0}, {"gradient_checkpointing": ["up_blocks.0"]}),
]
# Other adapters and steps of two forwards.
MORE_SETTINGS: list[tuple[Family, int, Options, Options]] = [
    ("sdxl", 2, {"adapter": "lokr", "layers": "all", "rank": 2, "lokr_factor": 4}, {}),
    ("sd15", 2, {"objective": {"prior_prediction": True, "loss_mix": "mse:1,l1:0.5,log_cosh:1"}, **TEXT}, {}),
    ("sdxl", 2, {"weighted_captions": True, **TEXT}, {}),
    ("sd15", 2, {"adapter": "tlora", "layers": "all", "tlora_min_rank": 3}, {}),
    ("sd15", 2, {"adapter": "dora", "layers": "all", **TEXT}, {}),
    ("sdxl", 1, {"adapter": "loha", "layers": "all"}, {"gradient_checkpointing": ["mid_block"]}),
    ("sd15", 2, {"adapter": "dora"}, {"quantize": "int8"}),
]
ARGUMENTS = {"adafactor": {"scale_parameter": True, "relative_step": True, "beta1": 0.9, "weight_decay": 0.1}}


@pytest.fixture
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the buffers of CUDA's kernels, which a CPU's do not have."""
    monkeypatch.setattr(tracer, "hidden_bytes", lambda func, args: ())


def both(subject: Workload, pictures: int) -> Iterator[tuple[list[int], list[int]]]:
    """Real and traced changes of two optimizer steps of two micro-batches each, part by part."""
    real = [outside_kernels(part) for part in real_steps(subject, BUCKET, pictures, micro_batches=2, steps=2)]
    tapes = trace_steps(subject, [BUCKET], pictures)
    micro = micro_batch(subject, BUCKET, pictures)
    micros = [traced_bytes(tapes.micro_first[BUCKET], micro), traced_bytes(tapes.micro_more[BUCKET], micro)]
    traced = [*micros, traced_bytes(tapes.optimizer_first), *micros, traced_bytes(tapes.optimizer)]
    yield from zip(real, traced, strict=True)


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize(("family", "pictures", "recipe", "fit"), of_the_day(5, [*SETTINGS, *MORE_SETTINGS]))
def test_every_allocation_of_real_steps_is_traced_in_its_order(
    family: Family, pictures: int, recipe: Options, fit: Options
) -> None:
    """The same bytes taken and given back, one by one: hence the same peaks, and the same left in the end."""
    for real, traced in both(tiny_workload(family, recipe, fit, masks="objective" in recipe), pictures):
        assert real == traced
        assert max(accumulate(real)) > 0


@pytest.mark.slow
@pytest.mark.usefixtures("plain_kernels")
def test_every_allocation_after_a_text_encoder_has_stopped() -> None:
    """SDXL's first one, while the second is trained on; checkpointing would need gradients of its inputs."""
    recipe = {**TEXT, "text_encoder": {"learning_rate": 1e-4, "stop_after": 5}}
    subject = tiny_workload("sdxl", recipe, {"gradient_checkpointing": "full"})
    stopped = replace(subject, after_stops=True)
    for real, traced in both(stopped, 2):
        assert real == traced
    peaks = [max(accumulate(traced)) for part in (subject, stopped) for _, traced in list(both(part, 2))[:1]]
    assert peaks[1] < peaks[0]


@pytest.mark.usefixtures("plain_kernels")
def test_every_allocation_in_bf16_but_for_statistics() -> None:
    """The CPU keeps the statistics of layer norms in bf16 where CUDA keeps fp32; all else is the same."""
    pictures, places = 2, (64, 16)
    statistics = {pictures * count * size for count in places for size in (2, 4)}
    for real, traced in both(tiny_workload("sd15", {"layers": "all"}, {"dtype": "bf16"}), pictures):
        assert [size for size in real if abs(size) not in statistics] == [
            size for size in traced if abs(size) not in statistics
        ]


@pytest.mark.slow
@pytest.mark.usefixtures("plain_kernels")
def test_the_peak_with_rotations() -> None:
    """The CPU inverts matrices in other memory than CUDA does, in small tensors."""
    for real, traced in both(tiny_workload("sd15", {"adapter": "oft", "layers": "all"}, {}), 2):
        assert max(accumulate(real)) == pytest.approx(max(accumulate(traced)), rel=1e-2)
        assert sum(real) == pytest.approx(sum(traced), abs=64)


@pytest.mark.usefixtures("plain_kernels")
def test_every_allocation_with_an_nf4_base() -> None:
    """On CUDA a product with 4-bit weights holds its restored scales to the end, on the CPU not: another order."""
    for real, traced in both(tiny_workload("sdxl", {}, {"quantize": "nf4"}), 2):
        assert sorted(real) == sorted(traced)
        assert max(accumulate(real)) == pytest.approx(max(accumulate(traced)), abs=256)


def subjects_of(size: str) -> list[Workload]:
    """Return tiny subjects in several settings, or the full SD 1.5 at a small resolution."""
    if size == "tiny":
        return [tiny_workload(family, recipe, fit) for family, _, recipe, fit in SETTINGS[2::2]]
    recipe = RecipeConfig(resolution=64, text_encoder={"learning_rate": 1e-5})  # type: ignore[arg-type]
    return [workload_without_base("sd15", recipe, FitConfig(dtype="fp32", attention="math"))]


@pytest.mark.parametrize("size", ["tiny", pytest.param("full", marks=pytest.mark.slow)])
def test_what_autograd_saves_is_known_to_the_byte(size: str) -> None:
    for subject in subjects_of(size):
        real, engine = _Saved(), cpu_engine(subject)
        with sdpa_kernel(SDPBackend.MATH), real.watching(engine):
            engine.micro_step(real_micro_batch(subject, BUCKET, 2))
        traced, engine = _Saved(), empty_engine(subject)
        with recording("math") as recorder, traced.watching(engine):
            label_engine(recorder, engine)
            recorder.cut("weights")
            with recorder.stage("forward"):
                engine.micro_step(micro_batch(subject, BUCKET, 2))
            tape = recorder.cut("step")
        assert real.bytes == traced.bytes > 0
        forward = [storage for storage in tape.storages if storage.stage == "forward"]
        kept = sum(storage.bytes for storage in forward if storage.kind == "activations")
        micro = sum(tensor.nbytes for tensor in tensors_of(micro_batch(subject, BUCKET, 2)))
        # Besides what autograd keeps, the micro-batch is there, and numbers of the loss.
        assert traced.bytes <= kept <= traced.bytes + micro + 8192


class _Saved:
    """Bytes of the storages that autograd keeps when backward begins, weights not counted."""

    def __init__(self) -> None:
        self.storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.bytes = 0

    @contextmanager
    def watching(self, engine: Engine) -> Iterator[None]:
        models = (engine.models.unet, *engine.models.text_encoders)
        weights = {tensor.untyped_storage()._cdata for model in models for _, tensor in lasting_tensors(model)}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in weights and torch._C._current_graph_task_id() == -1:
                self.storages[storage._cdata] = weakref.ref(storage)
            return tensor

        def unpack(tensor: Tensor) -> Tensor:
            alive = (reference() for reference in self.storages.values())
            self.bytes = self.bytes or sum(storage.nbytes() for storage in alive if storage is not None)
            return tensor

        with saved_tensors_hooks(pack, unpack):
            yield


@pytest.mark.parametrize(
    "name",
    of_the_day(4, NAMES),
)
def test_weights_gradients_and_state_are_exact_to_the_byte(name: str) -> None:
    optimizer = {"name": name, **ARGUMENTS.get(name, {})}
    subject = tiny_workload("sd15", {"text_encoder": {"learning_rate": 1e-4}, "rank": 32, "optimizer": optimizer})
    engine = cpu_engine(subject)
    engine.master_weights.load(initial_weights(engine.adapter, lambda _: np.random.default_rng(0)))
    tapes = trace_steps(subject, [BUCKET], 1)
    micros = (tapes.micro_first[BUCKET], tapes.micro_more[BUCKET])
    alive: dict[str, int] = {}
    play(alive, tapes.weights)
    for optimizer_tape in (tapes.optimizer_first, tapes.optimizer, tapes.optimizer):
        total = torch.zeros(())
        for micro_tape in micros:
            total += engine.micro_step(real_micro_batch(subject, BUCKET, 1))
            engine.master_weights.accumulate()
            play(alive, micro_tape)
        assert alive_bytes(alive) == sum(sizes_of(kept_by(engine)).values()) + total.nbytes
        set_learning_rates(engine.optimizer, 1.0)
        measure(total, engine.master_weights)
        engine.optimizer_step(1.0, 1.0)
        play(alive, optimizer_tape)
        assert alive_bytes(alive) == sum(sizes_of(kept_by(engine)).values())


def kept_by(engine: Engine) -> Iterator[Tensor]:
    """Every tensor that an engine keeps on its device."""
    for model in (engine.models.unet, *engine.models.text_encoders):
        yield from (tensor for _, tensor in lasting_tensors(model))
    for master in engine.master_weights.masters.values():
        yield master
        if master.grad is not None:
            yield master.grad
    for state in engine.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
    schedule = engine.noise_schedule
    yield from (schedule.alphas_cumprod, schedule.snr, schedule.signal, schedule.sigma)


def sizes_of(tensors: Iterator[Tensor]) -> dict[int, int]:
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def play(alive: dict[str, int], tape: MemoryTrace) -> None:
    """What lives by name before ``tape`` becomes what lives after it."""
    here: dict[int, str | None] = {}
    for event in tape.events.tolist():
        if event >= 0:
            here[event] = tape.storages[event].name
        elif ~event in here:
            del here[~event]
        else:
            del alive[cast(str, tape.storages[~event].name)]
    for index, name in here.items():
        storage = tape.storages[index]
        assert name is not None
        assert name not in alive or storage.kind == "workspace"
        alive[name] = storage.bytes


def alive_bytes(alive: Mapping[str, int]) -> int:
    return sum(size for name, size in alive.items() if not name.startswith("cublas."))


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_tapes_put_together_are_a_trace_of_the_loops_own_step(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = tiny_workload("sdxl", TEXT, {"dtype": dtype, "gradient_checkpointing": ["mid_block"]})
    tapes = trace_steps(subject, [BUCKET], 2)
    engine = empty_engine(subject)
    monkeypatch.setattr(engine_module, "measure", _measured)
    data: Any = _Data(subject)
    engine.batches = engine.collator = data
    with recording("math") as recorder:
        label_engine(recorder, engine)
        recorder.cut("weights")
        for optimizer in (tapes.optimizer_first, tapes.optimizer):
            with recorder.stage("forward"):
                engine.train_step()
            whole = recorder.cut("whole")
            micros = (tapes.micro_first[BUCKET], tapes.micro_more[BUCKET], tapes.micro_more[BUCKET])
            parts = join("whole", (*micros, optimizer))
            assert changes(parts) == changes(whole)
            assert sum(work.flops * work.count for work in parts.work) == sum(
                work.flops * work.count for work in whole.work
            )


class _Data:
    """Deals three micro-batches of one bucket a step, as Feed and Assembler do."""

    def __init__(self, subject: Workload) -> None:
        self.workload = subject

    def batch(self, step: int) -> Sequence[int]:
        return range(6)

    def split(self, batch: Sequence[int]) -> list[Sequence[int]]:
        return [batch[0:2], batch[2:4], batch[4:6]]

    def epoch_of(self, step: int) -> int:
        return 0

    def assemble(self, samples: Sequence[int], size: int) -> Any:
        return micro_batch(self.workload, BUCKET, len(samples))


def _measured(*arguments: Any) -> Any:
    """Measures on meta tensors, of which no number can be read."""
    measure(*arguments)
    return torch.ones(2)


def changes(tape: MemoryTrace) -> list[int]:
    """Bytes of each event; the workspaces of cuBLAS are in every micro-batch's tape, to be taken once."""
    kept = [(event, tape.storages[max(event, ~event)]) for event in tape.events.tolist()]
    return [storage.bytes if event >= 0 else -storage.bytes for event, storage in kept if storage.module != "cublas"]


def test_a_trace_is_the_same_each_time() -> None:
    subject = tiny_workload("sdxl", TEXT, {"gradient_checkpointing": "full", "dtype": "bf16", "attention": "auto"})
    first, second = trace_steps(subject, [BUCKET], 2), trace_steps(subject, [BUCKET], 2)
    for one, other in zip(traces_of(first), traces_of(second), strict=True):
        assert (one.name, one.storages, one.work) == (other.name, other.storages, other.work)
        assert np.array_equal(one.events, other.events)


def traces_of(tapes: StepTraces) -> list[MemoryTrace]:
    return [
        tapes.weights,
        *tapes.micro_first.values(),
        *tapes.micro_more.values(),
        tapes.optimizer_first,
        tapes.optimizer,
    ]


SCALED: list[tuple[Family, Size, Options, Options]] = [
    ("sd15", (128, 64), {**TEXT, "layers": "all", "dropout": 0.1}, {"attention": "auto"}),
    (
        "sdxl",
        (64, 64),
        {},
        {"dtype": "bf16", "attention": "auto", "quantize": "nf4", "gradient_checkpointing": ["mid_block"]},
    ),
]


@pytest.mark.parametrize(("family", "bucket", "recipe", "fit"), SCALED)
def test_tapes_of_two_and_three_pictures_give_those_of_any_more(
    family: Family, bucket: Size, recipe: Options, fit: Options
) -> None:
    subject = tiny_workload(family, recipe, fit)
    tapes = {pictures: trace_micro(subject, [bucket], pictures) for pictures in (2, 3, 4, 8)}
    for pictures in (4, 8):
        for kind in ("first", "more"):
            two, three, real = (getattr(tapes[size], kind)[bucket] for size in (2, 3, pictures))
            tape = scale(two, three, (2, 3), pictures)
            assert tape is not None
            assert (tape.storages, tape.work) == (real.storages, real.work)
            assert np.array_equal(tape.events, real.events)


def test_a_single_picture_follows_no_rule_of_more() -> None:
    """PyTorch sees a transposed picture as a matrix where it has to copy several."""
    subject = tiny_workload("sd15", {}, {"attention": "auto"})
    one, two = (trace_micro(subject, [BUCKET], pictures).more[BUCKET] for pictures in (1, 2))
    assert scale(one, two, (1, 2), 4) is None


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_the_bucket_of_most_pixels_bounds_all_others(family: Family) -> None:
    """Storage for storage, whatever the shape; so only that one need be traced."""
    buckets = [(128, 128), (64, 256), (256, 64), (96, 160), (64, 192), (64, 64)]
    subject = tiny_workload(family, {}, {"dtype": "bf16", "attention": "auto"})
    micros = trace_micro(subject, buckets, 2).more
    largest = micros[buckets[0]]
    for bucket in buckets[1:]:
        assert np.array_equal(micros[bucket].events, largest.events)
        assert all(a.bytes <= b.bytes for a, b in zip(micros[bucket].storages, largest.storages, strict=True))


ENCODER = {"text_encoder": {"learning_rate": 1e-4}}
RANKED: list[tuple[Family, Options, Options, Sequence[TracePart], Sequence[int]]] = [
    ("sd15", {**ENCODER, "layers": "linear"}, {"attention": "auto"}, ("load", "validate", "save"), (1, 24)),
    (
        "sdxl",
        {"layers": "all", "rank_dropout": 0.1},
        {"quantize": "nf4", "gradient_checkpointing": "full"},
        ["quantise"],
        [128],
    ),
]


@pytest.mark.parametrize(("family", "recipe", "fit", "phases", "ranks"), RANKED)
def test_tapes_of_two_ranks_give_those_of_any_other(
    family: Family,
    recipe: Options,
    fit: Options,
    phases: Sequence[TracePart],
    ranks: Sequence[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of everything that holds a LoRA; nothing is traced for them but those of the two."""
    # Nothing in so tiny a base is as wide as these, whose operations would then count as the same as others.
    monkeypatch.setattr("trainer.memory.trace.derive.RANKS", (20, 28))
    subject = tiny_workload(family, recipe, fit)
    wishes = [TraceRequest(subject, "micro", (BUCKET, 2)), *(TraceRequest(subject, part) for part in phases)]
    traces, real = TraceLibrary(TraceStore(tmp_path)), TraceLibrary(TraceStore(tmp_path / "real"))
    derived = set()
    for rank in (20, 28, *ranks):
        for wish in (replace(wish, workload=subject.at_rank(rank)) for wish in wishes):
            traces.read(wish)
            if rank in ranks:
                derived.add(wish.key)
                real.read(wish)
                assert_alike(traces.store.load(wish.key) or (), real.store.load(wish.key) or ())
    assert derived and not derived & set(traces.traced)
    assert derived & set(real.traced)


@pytest.mark.parametrize("name", ["adamw8bit", pytest.param("adafactor", marks=pytest.mark.slow), "schedulefree"])
def test_micro_batches_and_optimizers_do_not_depend_on_each_other(name: str) -> None:
    """So that each is traced once for all of the others."""
    plain = tiny_workload("sd15", ENCODER, {"dtype": "bf16"})
    optimizer = tiny_workload("sd15", {**ENCODER, "optimizer": {"name": name}}, {"dtype": "bf16"})
    micro = {"objective": {"min_snr_gamma": 5.0}, "optimizer": {"name": name}}
    both = tiny_workload(
        "sd15", {**ENCODER, **micro}, {"dtype": "bf16", "quantize": "nf4", "gradient_checkpointing": "full"}
    )
    alone = trace_optimizer(optimizer)
    assert_alike(trace_optimizer(both), alone)
    assert_alike(trace_micro(both, [BUCKET], 2, with_optimizer=True).optimizer, alone)
    assert_alike(micro_tapes(optimizer), micro_tapes(plain))


@pytest.mark.parametrize(
    "quantize", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("int8", "int8_products")), "nf4"]
)
def test_models_that_were_traced_before_give_the_same_tapes(quantize: str) -> None:
    subject = tiny_workload("sd15", ENCODER, {"dtype": "bf16", "quantize": quantize})
    checkpointed = replace(subject, fit=subject.fit.replaced(gradient_checkpointing="full"))

    def unet() -> object:
        return empty_engine(subject).models.unet

    meta_models._latest.clear()
    fresh_checkpointed = micro_tapes(checkpointed)
    meta_models._latest.clear()
    fresh, once = micro_tapes(subject), unet()
    for _ in range(2):
        assert_alike(micro_tapes(checkpointed), fresh_checkpointed)
    trace_optimizer(subject)
    with pytest.raises(RuntimeError, match="ended"), recording("math"):
        for weight in empty_engine(subject).adapter.parameters.values():
            weight.grad = torch.empty_like(weight)
        raise RuntimeError("ended in the middle")
    assert_alike(micro_tapes(subject), fresh)
    assert unet() is once


@pytest.mark.parametrize("quantize", [pytest.param("int8", marks=pytest.mark.slow), "int8_products", "nf4"])
def test_rounded_weights_are_multiplied_as_often_as_plain_ones(quantize: str) -> None:
    """However a base is kept, its products are work of the same size, forward, recomputed and backward."""
    plain = tiny_workload("sdxl", {}, {"dtype": "bf16", "gradient_checkpointing": "full"})
    rounded = replace(plain, fit=plain.fit.replaced(quantize=quantize))
    assert products_of(rounded) == products_of(plain)


def products_of(subject: Workload) -> Counter[str]:
    """The flops of matrix products by stage."""
    found: Counter[str] = Counter()
    for work in micro_tapes(subject)[1].work:
        found[work.stage] += work.flops * work.count * (work.kind == "gemm")
    return found


def micro_tapes(subject: Workload) -> tuple[MemoryTrace, ...]:
    micro = trace_micro(subject, [BUCKET], 1)
    return micro.weights, micro.first[BUCKET], micro.more[BUCKET]


def assert_alike(ones: Sequence[MemoryTrace], others: Sequence[MemoryTrace]) -> None:
    for one, other in zip(ones, others, strict=True):
        assert (one.name, one.storages, one.work) == (other.name, other.storages, other.work)
        assert np.array_equal(one.events, other.events)
