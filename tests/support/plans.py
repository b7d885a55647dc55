"""Small workloads to plan for, and GPUs with a given number of bytes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from tests.support.tiny import tiny_configs
from trainer.config.base import BaseConfig, Family
from trainer.config.fit import FitConfig
from trainer.config.job import DatasetConfig, FolderConfig, Job, PromptConfig
from trainer.config.recipe import RecipeConfig
from trainer.config.resolve import Machine, resolve_job
from trainer.memory.device.calibration import Correction
from trainer.memory.device.device_state import DeviceState, state_of_listed_gpu
from trainer.memory.device.gpu_specs import find_gpu
from trainer.memory.trace.workload import BucketUse, Workload, complete_fit

SIDE = 256


def small_workload(
    family: Family = "sd15", *, previews: bool = True, side: int = SIDE, channels: int = 32, **recipe: Any
) -> Workload:
    """Return a workload of a UNet with three blocks in all, at ``side`` pixels; ``recipe`` are keys of a recipe.

    With few ``channels`` activations take most of the memory, with many the weights do, as in real models.
    """
    configs = tiny_configs(family)
    unet = {
        **configs["unet"],
        "block_out_channels": [channels],
        "layers_per_block": 1,
        "down_block_types": ["CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D"],
    }
    values = {
        "rank": 4, "layers": "attention", "steps": 100, "effective_batch": 2, "resolution": side, **recipe
    }  # fmt: skip
    job = Job(
        name="plan",
        base=BaseConfig(model="base", family=family),
        dataset=DatasetConfig(folders=(FolderConfig(path="pictures"),)),
        recipe=RecipeConfig.model_validate(values),
    )
    resolved = resolve_job(
        job,
        family=family,
        prediction="epsilon",
        zero_terminal_snr=False,
        samples_per_epoch=10,
        machine=Machine("cpu", None, None, bf16=True, cores=1),
    ).recipe
    prompt = PromptConfig(prompt="a cat", width=side, height=side, steps=4)
    return Workload(
        family=family,
        unet_config=unet,
        vae_config={**configs["vae"], "block_out_channels": [4] * 4, "norm_num_groups": 4, "layers_per_block": 1},
        text_configs=tuple(configs[name] for name in configs if name.startswith("text_encoder")),
        recipe=resolved,
        fit=complete_fit(FitConfig()),
        buckets=(BucketUse(side, side, 10),),
        previews=(prompt,) if previews else (),
    )


def device_state_with(budget: int, *, workspace: int = 4096) -> DeviceState:
    """Return a GPU on which PyTorch's allocator may take ``budget`` bytes; workspaces are as small as the models."""
    device_state = _card(workspace)
    low, high = budget, 2 * budget + 2**30
    while low < high:  # the margin grows with the free memory
        middle = (low + high) // 2
        if replace(device_state, free_bytes=middle).budget < budget:
            low = middle + 1
        else:
            high = middle
    return replace(device_state, free_bytes=low)


@cache
def _card(workspace: int) -> DeviceState:
    found = state_of_listed_gpu(find_gpu("8GB"), system="Linux")
    overheads = replace(found.overheads, cublas_workspace_bytes=workspace)
    # Small models would only wait for the CPU; with a fast CPU, the GPU's work decides.
    rate = replace(found.rate, host=0.0, launch=1e-6)
    return replace(found, overheads=overheads, correction=Correction(), rate=rate)
