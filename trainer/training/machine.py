"""What this machine is, as far as a run depends on it: device, versions, threads, and how its mathematics is set."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

import torch

from trainer.config.job import Job
from trainer.config.resolve import Machine
from trainer.errors import JobError

LIBRARIES = (
    "torch",
    "diffusers",
    "transformers",
    "peft",
    "bitsandbytes",
    "accelerate",
    "safetensors",
    "numpy",
    "pillow",
)


def this_machine(wanted: str | None) -> Machine:
    """The device that ``wanted`` names ("cpu", "cuda", "cuda:1"), or the best there is when it is None.

    Raises JobError when a card is asked for that PyTorch cannot see.
    """
    cores = os.cpu_count() or 1
    if wanted == "cpu" or (wanted is None and not torch.cuda.is_available()):
        return Machine(device="cpu", card=None, total_bytes=None, bf16=True, cores=cores)
    index = torch.device(wanted or best_card()).index or 0
    if index >= torch.cuda.device_count():
        raise JobError(
            "fit.device",
            f"fit.device is {wanted}, but PyTorch sees {torch.cuda.device_count()} CUDA cards here.",
            "Set fit.device to a card that is there, or remove the line; `python -m trainer doctor` lists them.",
        )
    properties = torch.cuda.get_device_properties(index)
    bf16 = properties.major >= 8  # earlier generations only emulate bf16, slowly
    return Machine(f"cuda:{index}", properties.name, properties.total_memory, bf16, cores)


def best_card() -> str:
    """The card with the most free memory."""
    free = [torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())]
    return f"cuda:{free.index(max(free))}"


def versions() -> dict[str, str]:
    """The versions that a result may depend on."""
    return {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}


@contextmanager
def numerics(job: Job) -> Iterator[None]:
    """Sets threads and determinism as the frozen job says while inside, and puts them back."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    if job.fit.threads:
        torch.set_num_threads(job.fit.threads)
    if job.fit.deterministic:
        # cuBLAS is repeatable only with a fixed workspace; it reads this when its first handle is made.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(bool(job.fit.deterministic))
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)
