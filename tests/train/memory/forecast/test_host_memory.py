"""Main memory of phases against what the functions take that run in them."""

from __future__ import annotations

import threading
import tracemalloc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.random import default_rng

from tests.support.plans import device_state_with
from tests.support.waiting import until
from tests.train.memory.trace.test_other_phases import CPU, played, subject, tiny
from trainer.adapter.attach import initial_weights
from trainer.base import streaming
from trainer.base.streaming import streamed_modules
from trainer.config.fit import FitConfig, StreamAmount
from trainer.memory.forecast.forecast import PROCESS_BYTES, forecast
from trainer.memory.forecast.host_memory import CROPS_WAITING, IMAGE_BYTES, host_bytes, streamed_bytes
from trainer.memory.trace import other_phases
from trainer.memory.trace.library import TraceLibrary
from trainer.memory.trace.memory_trace import Storage
from trainer.memory.trace.meta_models import bare_unet, empty_engine
from trainer.memory.trace.store import TraceStore
from trainer.training.checkpoint import Checkpoint, save_checkpoint
from trainer.training.data.pipeline import READER_THREADS, Pipeline

MIB = 2**20


def of(name: str, kind: str, size: int) -> Storage:
    return Storage(size, kind, "unet", "", name)  # type: ignore[arg-type]


@pytest.mark.parametrize(("masters", "state", "average"), [(4, 8, 0), (4, 4, 0), (4, 8, 4)])
def test_checkpoints_take_what_writing_them_takes(tmp_path: Path, masters: int, state: int, average: int) -> None:
    weights = {f"a{index}": torch.zeros(masters * MIB // 16) for index in range(4)}
    moments = {f"o{index}": torch.zeros(state * MIB // 16) for index in range(4)}
    averages = {f"a{index}": torch.zeros(average * MIB // 16) for index in range(4) if average}
    tracemalloc.start()
    save_checkpoint(tmp_path, Checkpoint(1, weights, moments, {}, averages))
    written = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The state lies in main memory already here; from a card it comes as a copy, which is there to the end.
    living = [of("master.a", "adapter", masters * MIB), of("exp_avg.a", "optimizer", state * MIB)]
    living.append(of("ema.a", "adapter", average * MIB))
    assert host_bytes("checkpoint", tiny("sd15"), (), living) == pytest.approx(written + state * MIB, rel=0.03)


def test_loading_holds_one_tensor_twice_or_the_adapters_first_weights() -> None:
    small, large = subject("sd15", 512, FitConfig(dtype="bf16")), tiny("sd15", CPU)
    widest = 2560 * 1280 * 3 * 3  # the first layer of the resnets in the lowest up blocks
    assert host_bytes("load", small, other_phases.load(small), ()) == max(6 * widest, first_weights(small))
    # At a high rank the adapter is larger than any weight of a tiny base.
    large = tiny("sd15", CPU, rank=64)
    assert host_bytes("load", large, other_phases.load(large), ()) == first_weights(large)


@pytest.mark.parametrize("stream", ["none", 2, "full"])
def test_streamed_weights_stay_in_main_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: StreamAmount
) -> None:
    monkeypatch.setattr(streaming, "MIN_BYTES", 1 << 12)
    wanted = tiny("sd15", FitConfig(dtype="bf16", stream=stream))
    weights = [weight for block in streamed_modules(bare_unet(wanted).unet, stream) for weight in block.parameters()]
    large = sum(2 * weight.numel() for weight in weights if 2 * weight.numel() >= 1 << 12)
    assert streamed_bytes(other_phases.load(wanted)) == large
    found = forecast(wanted, device_state_with(1 << 34), TraceLibrary(TraceStore(tmp_path)))
    by_phase = {phase.phase: phase.host for phase in found.phases}
    assert by_phase["train"] == PROCESS_BYTES + large + host_bytes("train", wanted, (), ()) and (large > 0) == (
        stream != "none"
    )


def first_weights(wanted: other_phases.Subject) -> int:
    adapter = empty_engine(wanted).adapter
    return sum(weight.nbytes for weight in initial_weights(adapter, lambda _: default_rng(0)).values())


def test_the_unet_that_waits_lies_in_main_memory() -> None:
    staying, leaving = tiny("sd15"), tiny("sd15", CPU.replaced(preview_offload=True))
    unet = sum(weight.nbytes for weight in empty_engine(staying).models.unet.parameters())
    without = host_bytes("preview", staying, other_phases.preview(staying), ())
    assert host_bytes("preview", leaving, other_phases.preview(leaving), ()) == without + unet


def test_caching_holds_one_weight_one_picture_and_what_waits_before_and_after_the_model() -> None:
    """Cut pictures and latents or embeddings: eight of these and those in work."""
    wanted = subject("sdxl", 1024, FitConfig(vae_dtype="fp32", dtype="bf16"))
    waiting = (READER_THREADS + 2) * 3 * 4 * 1024 * 1024 + 11 * 2 * 4 * 128 * 128 * 4
    pictures = IMAGE_BYTES + 4 * 512 * 512 * 9 + waiting
    assert host_bytes("cache_pictures", wanted, other_phases.cache_pictures(wanted), ()) == pictures
    masked = host_bytes("cache_pictures", replace(wanted, masks=True), other_phases.cache_pictures(wanted), ())
    assert masked == pictures + (READER_THREADS + 2) * 4 * 1024 * 1024 + 11 * 128 * 128 * 4
    exact = replace(wanted, fit=wanted.fit.replaced(deterministic=True))
    for one, at_once in ((wanted, 8), (exact, 1)):
        texts = 6 * 49408 * 1280 + 11 * at_once * 77 * (768 + 1280) * 4
        assert host_bytes("cache_texts", one, other_phases.cache_texts(one), ()) == texts


def test_as_many_cut_pictures_wait_as_are_counted() -> None:
    """When the model works on one, and every reader is done and has let go; one more as the next is taken."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    waiting: list[int] = []
    count = 20
    made = threading.Semaphore(0)

    def ready(_: int) -> Any:
        alive.add(holder := Holder(default_rng(0).random((2, 2))))
        made.release()
        return holder

    def compute(_: Any) -> int:
        for _ in range(READER_THREADS + 1 if not waiting else len(waiting) + READER_THREADS < count):
            made.acquire()
        # A reader lets go of a picture a moment after it has handed it over.
        until(lambda: len(alive) < READER_THREADS + CROPS_WAITING)
        waiting.append(len(alive))
        return 0

    Pipeline(ready, compute, lambda *_: None, READER_THREADS).run(range(count), lambda _: None)
    assert max(waiting) == READER_THREADS + CROPS_WAITING - 1


class Holder:
    """Something that a weak reference can be made to."""

    def __init__(self, picture: Any) -> None:
        self.picture = picture


def test_micro_batches_loaded_in_advance() -> None:
    """Two images of 1024 pixels: at most 32 images in advance and two in use, in sizes that are powers of two."""
    latents, text = 2 * 4 * 128 * 128 * 4, 1 << (2 * 77 * (768 + 1280) * 4).bit_length()
    one = subject("sdxl", 1024, FitConfig(micro_batch=2))
    assert host_bytes("train", one, (), ()) == host_bytes("first_step", one, (), ()) == 17 * (3 * latents + text)
    few = subject("sdxl", 1024, FitConfig(micro_batch=2, prefetch_batches=3))
    assert host_bytes("train", few, (), ()) == 4 * (3 * latents + text)


def test_training_and_saving() -> None:
    names, _ = played(other_phases.load(tiny("sd15")))
    living = [kept.storage for kept in names.values()]
    masters = sum(kept.storage.bytes for name, kept in names.items() if name.startswith("master."))
    assert host_bytes("validate", tiny("sd15"), (), living) == 0
    assert host_bytes("save", tiny("sd15"), (), living) == 3 * masters > 0
