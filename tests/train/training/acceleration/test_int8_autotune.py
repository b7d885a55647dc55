"""Layers multiply in int8 where a measurement of the run's own layers says so, each direction of each size on its own.

Without a card the CPU's products stand in for a card's, really computed; only what a clock says is given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.images import make_picture
from tests.support.tiny import tiny_base, tiny_configs, tiny_models
from trainer.base.quantized import quantizable_linears
from trainer.base.source import BaseSource, empty_diffusers_model, open_base
from trainer.config.base import BaseConfig, Family
from trainer.config.fit import Int8LayerConfig
from trainer.config.job import Job
from trainer.config.load import parse_job
from trainer.training.acceleration import int8_autotune
from trainer.training.acceleration.attention_autotune import Clock
from trainer.training.acceleration.int8_autotune import (
    Linear,
    Timing,
    autotune_int8,
    choose_int8,
    linear_calls,
    time_all,
)

CPU = torch.device("cpu")
WIDE, TEXT = Linear(64, 32, 64, True), Linear(20, 32, 32, False)
LAYERS = {WIDE: 2, TEXT: 3, Linear(16, 32, 64, True): 1, Linear(64, 30, 64, True): 1}
"""The last two are those of which cards refuse the rows or the size."""


def empty(family: Family) -> Any:
    return empty_diffusers_model(type(tiny_models(family)["unet"]), tiny_configs(family)["unet"], "a tiny base")


@pytest.mark.parametrize(("family", "size", "live_text"), [("sd15", (128, 64), False), ("sdxl", (64, 72), True)])
def test_the_layers_found_are_those_at_work_in_a_real_forward(
    family: Family, size: tuple[int, int], live_text: bool
) -> None:
    unet, words, seen = tiny_models(family)["unet"].requires_grad_(False), 9, Counter[Linear]()

    def note(module: Any, args: Any, result: Tensor) -> None:
        x = args[0]
        seen[Linear(x[..., 0].numel(), x.shape[-1], result.shape[-1], result.requires_grad)] += 1

    hooks = [layer.register_forward_hook(note) for layer in quantizable_linears(unet).values()]
    latents = torch.zeros(2, 4, size[1] // 8, size[0] // 8, requires_grad=True)
    text = torch.zeros(2, words, tiny_configs(family)["unet"]["cross_attention_dim"], requires_grad=live_text)
    more = {"text_embeds": torch.zeros(2, 32), "time_ids": torch.zeros(2, 6)} if family == "sdxl" else None
    unet(latents, torch.zeros(2), text, added_cond_kwargs=more)
    for hook in hooks:
        hook.remove()
    assert linear_calls(empty(family), size, 2, words, live_text=live_text) == seen
    assert {one.has_input_gradient for one in seen} == {True, live_text}


def clock_of(seconds: list[float]) -> Callable[[float], Clock]:
    """Clocks that do the work once and say one after another what they are told to."""
    told = iter(seconds)

    def clock(work: Callable[[], object]) -> float:
        assert isinstance(work(), Tensor)
        return next(told)

    return lambda _: clock


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_direction_that_can_be_is_timed_and_decided_on_its_own(dtype: torch.dtype) -> None:
    chance = torch.get_rng_state()
    timings = time_all(LAYERS, CPU, dtype, clock_of([1.5, 2.0, 1.0, 0.5, 1.0, 0.96, 2.5, 3.0, 0.5]))
    assert [
        (one.linear, one.direction, one.unquantized, one.dequantized, one.int8, one.is_faster) for one in timings
    ] == [
        (WIDE, "forward", 1.5, 2.0, 1.0, True),
        (WIDE, "backward", 0.5, 1.0, 0.96, False),  # less than chance
        (TEXT, "forward", 2.5, 3.0, 0.5, True),  # nothing learns through it, so that there is no backward
    ]
    assert choose_int8(timings) == (
        Int8LayerConfig(inputs=32, outputs=32, forward=17),
        Int8LayerConfig(inputs=32, outputs=64, forward=48),
    )
    assert torch.equal(torch.get_rng_state(), chance)


def test_clocks_are_real_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_autotune, "SECONDS", 0.003)
    timings = time_all(LAYERS, CPU, torch.float32)
    assert len(timings) == 3
    assert all(0 < seconds < 10 for one in timings for seconds in (one.unquantized, one.dequantized, one.int8))
    assert not any(one.refused for one in timings)
    assert all(f"{one.int8 * 1e3:.2f} instead of {one.dequantized * 1e3:.2f} ms" in one.sentence for one in timings)


def timing(rows: int, int8: float, size: tuple[int, int] = (64, 64)) -> Timing:
    return Timing(Linear(rows, *size, True), "backward", 0.0, 1.0, int8)


def test_a_size_multiplies_so_from_where_it_pays_for_all_that_are_larger() -> None:
    falling = [(64, 0.5), (4096, 0.1), (256, 2.0), (1024, 0.9)]
    found = choose_int8([*(timing(*one) for one in falling), timing(9, 0.1, (8, 8))])
    assert found == (
        Int8LayerConfig(inputs=8, outputs=8, backward=17),
        Int8LayerConfig(inputs=64, outputs=64, backward=768),
    )
    assert choose_int8([timing(64, 0.1), timing(256, 1.0)]) == ()


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (lambda real, left, right: real(left, right) + 20 * left[:1, :1].int().abs().max() * 127, "wrong results"),
        (lambda real, left, right: real(left, right) * 0, "wrong results"),
        (None, "CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul"),
    ],
    ids=["shifted", "zeros", "not supported"],
)
def test_products_that_are_wrong_or_not_to_be_had_are_refused(
    broken: Callable[..., Tensor] | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of cuBLAS on some cards, by what its users tell."""
    real = torch._int_mm

    def product(left: Tensor, right: Tensor) -> Tensor:
        if right.is_contiguous():  # as the weight does not lie in either direction
            raise AssertionError("cuBLAS wants the second matrix column by column")
        if broken is None:
            raise RuntimeError(f"CUDA error: {told}\nand what else it says")
        return broken(real, left, right)

    monkeypatch.setattr(torch, "_int_mm", product)
    for clock in (None, clock_of([])):
        timings = time_all(LAYERS, CPU, torch.float32, clock)
        assert len(timings) == 3 and choose_int8(timings) == ()
        assert all(told in one.refused and not one.is_faster and one.refused in one.sentence for one in timings)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> BaseSource:
    return open_base(BaseConfig(model=str(tiny_base("sd15", tmp_path_factory.mktemp("bases"), depth=1))))


def job_of(**fit: Any) -> Job:
    text = 'name = "one"\nbase.model = "base"\ndataset.folders = [{path = "cats"}]\nrecipe.effective_batch = 4\n'
    job = parse_job(text, "job.toml", Path())
    return job.replaced(fit=job.fit.replaced(**{"device": "cpu", "dtype": "bf16", "micro_batch": 2} | fit))


PICTURES = [make_picture(number, bucket=size) for number, size in enumerate([(64, 64), (64, 64), (128, 64)])]


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts products in int8."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._int_mm.default
        return func(*args, **(kwargs or {}))


def test_a_run_multiplies_so_what_pays_in_the_shape_of_most_pictures_and_is_told(source: BaseSource) -> None:
    """A clock by which int8 takes a millisecond, and without it layers over all 128 places of two pictures take two."""
    seconds = []

    def clock(work: Callable[[], object]) -> float:
        counter = Products()
        with counter:
            result = work()
        assert isinstance(result, Tensor)
        seconds.append(0.001 if counter.count else 0.002 * (result.shape[0] >= 128))
        return seconds[-1]

    found = autotune_int8(job_of(quantize="int8_products"), source, PICTURES, lambda _: clock)
    assert found is not None and {*seconds} == {0.001, 0.002, 0.0}
    assert found.products == (
        Int8LayerConfig(inputs=32, outputs=32, forward=96, backward=96),
        Int8LayerConfig(inputs=32, outputs=64, forward=115),  # of captions, which learn nothing here
        Int8LayerConfig(inputs=32, outputs=256, forward=96, backward=96),
        Int8LayerConfig(inputs=128, outputs=32, forward=96, backward=96),
    )
    forward, backward = found.sentences
    for sentence, direction in ((forward, "forward"), (backward, "backward")):
        assert sentence.startswith(f"Linear layers, {direction}: ")
        assert " ms with int8 GEMMs where faster, " in sentence and " ms with an unquantized base " in sentence
        assert "(2 of 64x64, bf16); faster: 32 to 32 (128 rows) " in sentence
        assert "1.00 instead of 2.00 ms" in sentence and "; not faster: " in sentence


def test_nothing_is_timed_where_it_is_written_or_every_run_is_to_be_the_same(source: BaseSource) -> None:
    def timed(_: float) -> Clock:
        raise AssertionError("timed")

    fit: dict[str, Any] = {"quantize": "int8_products"}
    same = autotune_int8(job_of(**fit, deterministic=True), source, PICTURES, timed)
    assert same is not None and len(same.sentences) == 1
    both = {(one.inputs, one.outputs) for one in same.products if one.forward and one.backward}
    assert both == {(32, 32), (32, 256), (128, 32), (64, 64), (64, 512), (256, 64)}
    written = autotune_int8(job_of(**fit, int8_products=(Int8LayerConfig(forward=99),)), source, (), timed)
    assert written is not None and written.products == (Int8LayerConfig(forward=99),)
    for other in ("none", "int8", "nf4"):
        assert autotune_int8(job_of(quantize=other), source, (), timed) is None
