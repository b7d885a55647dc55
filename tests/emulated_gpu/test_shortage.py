"""Memory runs out on the emulated GPU outside of the training step; tests what a run does and reports then."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.emulated_gpu.machine import EmulatedGpu

LARGE_IMAGES = """
[recipe]
steps = 2
effective_batch = 1
resolution = 1024
rank = 4
images = {max_upscale = 16.0}
[fit]
device = "cuda"
threads = 1
[report]
validation = {timesteps = [500]}
"""
RAW = ("CUDACachingAllocator.cpp", "[W")


def events(run: Path) -> list[dict[str, Any]]:
    lines = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("leave_mib", [10, 120, 340])
def test_a_gpu_that_is_full_at_the_start_is_said_to_be_full_and_by_whom(
    emulated_gpu: EmulatedGpu, tiny_job: Callable[..., Path], leave_mib: int
) -> None:
    """The plan reports it before CUDA, the first tested kernel or a measurement runs out of memory."""
    job = tiny_job("sd15")
    with emulated_gpu.held(leave_mib):
        done = emulated_gpu.trainer("train", job)
    assert done.returncode == 2, done.stdout + done.stderr
    said = done.stdout + done.stderr
    assert "The largest programs on it: python (11." in said
    assert "Close other programs that use the GPU, then try again." in said
    assert "kernel" not in said and not any(raw in said for raw in RAW)


def test_images_that_find_no_memory_are_encoded_in_bf16_and_in_tiles(
    emulated_gpu: EmulatedGpu, tiny_job: Callable[..., Path]
) -> None:
    """The tiny VAE has no memory in fp32 or bf16 at 1024 pixels. Its UNet needs more, so training does not begin."""
    job = tiny_job("sd15")
    text = job.read_text(encoding="utf-8")
    job.write_text(text[: text.index("[recipe]")] + LARGE_IMAGES, encoding="utf-8")
    run = job.parent / "runs" / "test"
    emulated_gpu.fill_when(run / "events.jsonl", "cache_pictures", leave_mib=70)
    done = emulated_gpu.trainer("train", job)
    assert done.returncode == 75, done.stdout + done.stderr
    seen = events(run)
    changes = [event["changes"] for event in seen if event["type"] == "stepped_down"]
    assert changes[:2] == [{"vae_dtype": "bf16"}, {"vae_encode_tiling": True}]
    first, again = [event for event in seen if event["type"] == "memory_exhausted"][:2]
    assert first["allocated"] == again["allocated"], "memory of the first attempt was still in use"
    (last,) = [event for event in seen if event["type"] == "error"]
    assert "first step" in last["sentence"] and "(python 11." in last["remedy"]
    assert not any(raw in done.stdout + done.stderr for raw in RAW)


CONVOLUTION = """
import torch
from trainer.training.device.out_of_memory import is_out_of_memory
image = torch.zeros(1, 64, 512, 512, device="cuda")
convolution = torch.nn.Conv2d(64, 64, 3, padding=1, device="cuda")
if {full}:
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (96 << 20)) / {total})
try:
    convolution(image)
    print("convolved")
except RuntimeError as error:
    print(type(error).__name__, is_out_of_memory(error), str(error).splitlines()[0])
"""


@pytest.mark.parametrize("full", [False, True])
def test_a_convolution_whose_only_engine_finds_no_memory_is_a_shortage(
    make_gpu: Callable[..., EmulatedGpu], full: bool
) -> None:
    gpu = make_gpu("3060", CUDNN_ENGINES=1, CUDNN_SHARE=1.0)
    done = gpu.python("-c", CONVOLUTION.format(full=full, total="torch.cuda.mem_get_info()[1]"))
    assert done.returncode == 0, done.stderr
    assert ("True" in done.stdout and "find an engine" in done.stdout) if full else "convolved" in done.stdout


def test_nothing_is_timed_without_the_cap(emulated_gpu: EmulatedGpu, tiny_job: Callable[..., Path]) -> None:
    """Without a limit, the Windows driver would continue in main memory, and measurements would be meaningless."""
    source = (
        "import sys, torch\n"
        "from trainer.cli import main\n"
        "from trainer.training.acceleration import attention_autotune, throughput\n"
        "shares = []\n"
        "def noting(real):\n"
        "    def note(*words, **named):\n"
        "        shares.append(torch.cuda.get_per_process_memory_fraction())\n"
        "        return real(*words, **named)\n"
        "    return note\n"
        "throughput.measure_rate = noting(throughput.measure_rate)\n"
        "attention_autotune.autotune = noting(attention_autotune.autotune)\n"
        "code = main(['train', sys.argv[1]])\n"
        "assert code == 0 and len(shares) == 2 and all(0 < share < 1 for share in shares), (code, shares)\n"
    )
    done = emulated_gpu.python("-c", source, tiny_job("sd15"))
    assert done.returncode == 0, done.stdout + done.stderr
