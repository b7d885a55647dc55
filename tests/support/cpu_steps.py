"""Real training steps on the CPU with every allocation recorded, to compare traces with."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.autograd.profiler import record_function
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from tests.support.allocations import Change, changes_of, marking_main_memory, outside
from tests.support.tiny import Depth, tiny_configs
from trainer.base.weights import Placer, StoredTensor, place_weights
from trainer.config.base import Family
from trainer.config.fit import FitConfig
from trainer.config.recipe import RecipeConfig
from trainer.memory.trace.memory_trace import MemoryTrace
from trainer.memory.trace.meta_models import bare_text_encoders, bare_unet, dtype_of, engine_around, micro_batch
from trainer.memory.trace.workload import BucketUse, Workload, complete_fit
from trainer.training.engine import Engine
from trainer.training.optim.master_weights import measure
from trainer.training.optim.optimizer import set_learning_rates
from trainer.training.step import MicroBatch

Size = tuple[int, int]

CPU = torch.device("cpu")
# What happens inside these is up to the CPU's kernels: unlike a GPU's, they copy and pack.
CPU_KERNELS = frozenset(
    f"aten::{name}"
    for name in (
        "convolution",
        "convolution_backward",
        "copy_",  # if it transposes
        "_foreach_add_",  # of different dtypes
        "_int_mm",
        "addcdiv",  # of different dtypes
        "addcmul",  # of different dtypes
        "addmm",
        "baddbmm",
        "bmm",
        "mm",
        "mul",  # of different dtypes
        "native_group_norm_backward",
        "native_layer_norm",
        "native_layer_norm_backward",
        "upsample_nearest2d",
        "upsample_nearest2d_backward",
    )
)
# Scalars that multiply tensors are put into temporary tensors, which on the CPU are in the device's memory.
SCALAR_BYTES = 8
PART = "part"


def tiny_workload(
    family: Family,
    recipe: Mapping[str, Any] | None = None,
    fit: Mapping[str, Any] | None = None,
    buckets: tuple[Size, ...] = ((64, 64),),
    depth: Depth = 1,
    **facts: Any,
) -> Workload:
    """Return a tiny base, by default in fp32 with attention computed by the same operations on every device."""
    configs = tiny_configs(family, depth=depth)
    return Workload(
        family=family,
        unet_config=configs["unet"],
        vae_config=configs["vae"],
        text_configs=tuple(configs[part] for part in configs if part.startswith("text_encoder")),
        recipe=RecipeConfig.model_validate({"resolution": 64, "rank": 4, **(recipe or {})}),
        fit=complete_fit(FitConfig.model_validate({"dtype": "fp32", "attention": "math", **(fit or {})})),
        buckets=tuple(BucketUse(*bucket, 1) for bucket in buckets),
        **facts,
    )


def cpu_engine(workload: Workload) -> Engine:
    """Return the engine that a run builds on the CPU, with zero weights, whose pages cost no memory at any size."""
    dtype = dtype_of(workload)
    unet, placer, stream = bare_unet(workload, CPU)
    encoders = bare_text_encoders(workload) if workload.trained_texts else []
    _place_zeros(unet, dtype, placer)
    for encoder in encoders:
        _place_zeros(encoder, dtype, None)
    return engine_around(workload, unet, encoders, CPU, stream)


def _place_zeros(model: torch.nn.Module, dtype: torch.dtype, placer: Placer | None) -> None:
    def zeros(shape: torch.Size) -> torch.Tensor:
        return torch.from_numpy(np.zeros(shape, dtype=np.int32 if dtype == torch.float32 else np.int16)).view(dtype)

    stored = {name: StoredTensor(weight, partial(zeros, weight.shape)) for name, weight in model.named_parameters()}
    place_weights(model, stored, source="zeros", dtype=dtype, device=CPU, placer=placer)


def real_micro_batch(workload: Workload, bucket: Size, pictures: int) -> MicroBatch:
    """Return a micro-batch of noise."""
    micro = micro_batch(workload, bucket, pictures)
    for tensor in (micro.latents, micro.noise, micro.input_noise, micro.mask, micro.time_ids):
        if tensor is not None:
            tensor.normal_()
    if micro.text is not None:
        micro.text.hidden.normal_()
        if micro.text.pooled is not None:
            micro.text.pooled.normal_()
    for tokens in micro.tokens or ():
        tokens[:, 0], tokens[:, 1:] = 49406, 49407
    micro.timesteps.fill_(500)
    return micro


def real_steps(
    workload: Workload, bucket: Size, pictures: int, micro_batches: int, steps: int = 1
) -> list[list[Change]]:
    """Return every allocation of real optimizer steps, by part: the micro-batches of a step, then its optimizer."""
    engine = cpu_engine(workload)
    with (
        marking_main_memory(),
        sdpa_kernel(SDPBackend.MATH),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorder,
    ):
        for _ in range(steps):
            total = torch.zeros(())
            for _ in range(micro_batches):
                micro = real_micro_batch(workload, bucket, pictures)
                with record_function(PART):
                    total += engine.micro_step(micro)
                    engine.master_weights.accumulate()
            with record_function(PART):
                set_learning_rates(engine.optimizer, 1.0)
                measure(total, engine.master_weights, engine.loss_scale)
                engine.optimizer_step(1.0, 1.0)
    return _parts(changes_of(recorder.profiler))


def outside_kernels(changes: list[Change]) -> list[int]:
    """Return the bytes of each change, without what a CPU kernel allocated and freed within itself."""
    return [size for size in outside(changes, CPU_KERNELS) if abs(size) > SCALAR_BYTES]


def traced_bytes(trace: MemoryTrace, micro: MicroBatch | None = None) -> list[int]:
    """Return the bytes of each event of a trace, without workspaces, which a CPU does not have.

    With ``micro``, also without its tensors: on the CPU they are already in place, to a GPU they are copied.
    """
    copies = [] if micro is None else sorted(tensor.nbytes for tensor in tensors_of(micro))
    begin = next(index for index, storage in enumerate(trace.storages) if storage.name != "loss")
    assert sorted(storage.bytes for storage in trace.storages[begin : begin + len(copies)]) == copies
    changes = []
    for event in trace.events.tolist():
        index = max(event, ~event)
        storage = trace.storages[index]
        copied = begin <= index < begin + len(copies)
        if storage.kind != "workspace" and not copied and storage.bytes > SCALAR_BYTES:
            changes.append(storage.bytes if event >= 0 else -storage.bytes)
    return changes


def tensors_of(micro: MicroBatch) -> list[torch.Tensor]:
    """Return every tensor of a micro-batch."""
    text = [] if micro.text is None else [micro.text.hidden, micro.text.pooled]
    fields = [getattr(micro, field) for field in MicroBatch.__slots__]
    found = [*fields, *text, *(micro.tokens or ())]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def _parts(changes: list[Change]) -> list[list[Change]]:
    """Return the changes of each part, in order."""
    by_part: dict[int, list[Change]] = {}
    for change in changes:
        for number, name in change.operations:
            if name == PART:
                by_part.setdefault(number, []).append(change)
    return list(by_part.values())
