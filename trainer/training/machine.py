"""What this machine is, as far as a run depends on it: device, versions, threads, and how its mathematics is set."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch

from trainer import gpu
from trainer.config.job import Job
from trainer.config.resolve import Machine
from trainer.cores import usable_cores
from trainer.errors import ImpastoError, JobError


def this_machine(wanted: str | None) -> Machine:
    """The device that ``wanted`` names ("cpu", "cuda", "cuda:1"), or the best there is when it is None.

    Raises JobError when a card is asked for that PyTorch cannot see.
    """
    cores = usable_cores()
    if wanted == "cpu" or (wanted is None and not torch.cuda.is_available()):
        return Machine(device="cpu", card=None, total_bytes=None, bf16=True, cores=cores)
    index = torch.device(wanted or best_card()).index or 0
    if index >= torch.cuda.device_count():
        raise JobError(
            "fit.device",
            f"fit.device is {wanted}, but PyTorch sees {torch.cuda.device_count()} CUDA cards here.",
            "Set fit.device to a card that is there, or remove the line; `python -m trainer doctor` lists them.",
        )
    card = card_of(index)
    return Machine(f"cuda:{index}", card.name, card.total_bytes, card.bf16, cores)


def own_bytes(card: gpu.Card, index: int) -> int | None:
    """Return what this process holds of PyTorch's GPU ``index``, its CUDA context included.

    None where there is a context and the driver does not say how large it is: on Windows, and in containers with
    process numbers of their own.
    """
    # PyTorch knows it only privately, and its build for the CPU not at all.
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if has_context is None or not has_context(index):
        return 0
    return next((use.bytes for use in card.uses if use.pid == os.getpid()), None)


def best_card() -> str:
    """The card with the most free memory."""
    free = [card_of(index).free_bytes for index in range(torch.cuda.device_count())]
    return f"cuda:{free.index(max(free))}"


def card_of(index: int) -> gpu.Card:
    """PyTorch's card ``index`` as the driver describes it, or as PyTorch does where the driver lists it not.

    Asking the driver takes no memory; asking PyTorch for what is free makes a CUDA context of hundreds of MiB.
    """
    properties = torch.cuda.get_device_properties(index)
    found: list[gpu.Card] = []
    with suppress(ImpastoError):  # PyTorch speaks to the card, so training can do without what NVML tells
        found = gpu.cards()
    card = gpu.card_with_uuid(str(properties.uuid), found)
    if card is not None:
        return card
    free, total = torch.cuda.mem_get_info(index)
    capability = (properties.major, properties.minor)
    return gpu.Card(index, str(properties.uuid), properties.name, total, free, "unknown", (0, 0), capability, uses=())


@contextmanager
def numerics(job: Job) -> Iterator[None]:
    """Sets threads, determinism and how fp16 is added up as the frozen job says while inside, and puts them back.

    So it does the card that counts as the present one: events and streams go there where none is named, and on another
    card they would time nothing and make a CUDA context of hundreds of MiB.
    """
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    accumulation = torch.backends.cuda.matmul.allow_fp16_accumulation
    taking: Any = torch.utils.deterministic  # its one setting is declared to no type checker
    filling = taking.fill_uninitialized_memory
    present = ExitStack()
    if job.fit.threads:
        torch.set_num_threads(job.fit.threads)
    if job.fit.device and job.fit.device.startswith("cuda"):
        present.enter_context(torch.cuda.device(job.fit.device))
        capability = torch.cuda.get_device_capability(job.fit.device)
        workspace = gpu.cublas_workspace(capability, deterministic=bool(job.fit.deterministic))
        # Read when the first matrices are multiplied. What the user set stays, and is read by the forecast as well.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", workspace)
    torch.use_deterministic_algorithms(bool(job.fit.deterministic))
    # Else PyTorch writes NaN to all memory that it takes, an operation each time, before anybody writes there himself.
    # Our tests let it.
    taking.fill_uninitialized_memory = False
    torch.backends.cuda.matmul.allow_fp16_accumulation = job.fit.fp16_accumulation
    try:
        with present:
            yield
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = accumulation
        taking.fill_uninitialized_memory = filling
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)
