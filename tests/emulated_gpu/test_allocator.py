"""Tests of the emulated GPU itself: PyTorch's own allocator on its memory, and the values of read-backs (fastest)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.emulated_gpu.machine import MIB, EmulatedGpu

CAPACITY = 2000
PROGRAM = """
import json, torch
free, total = torch.cuda.mem_get_info()
facts = {"name": torch.cuda.get_device_name(0), "free": free, "total": total}
blocks = [torch.empty(100 << 20, dtype=torch.uint8, device="cuda") for _ in range(16)]
facts["reserved"] = torch.cuda.memory_reserved()
facts["free_then"] = torch.cuda.mem_get_info()[0]
try:
    torch.empty(150 << 20, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    facts["error"] = str(error)
before = torch.cuda.memory_stats()["num_alloc_retries"]
del blocks[:3]
large = torch.empty(300 << 20, dtype=torch.uint8, device="cuda")
facts["retries"] = torch.cuda.memory_stats()["num_alloc_retries"] - before
facts["reserved_then"] = torch.cuda.memory_reserved()
del large
del blocks
torch.cuda.empty_cache()
facts["free_at_last"] = torch.cuda.mem_get_info()[0]
values = torch.zeros(2, 3, device="cuda")
dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
facts["items"] = [values.to(dtype).sum().item() for dtype in dtypes]
facts["copies"] = [values.to(dtype).t().cpu().flatten().tolist() for dtype in dtypes]
facts["converted"] = values.bfloat16().to("cpu", torch.float32).flatten().tolist()
facts["pinned"] = torch.empty(6, pin_memory=True).copy_(values.flatten(), non_blocking=True).tolist()
facts["norm"] = float(torch.stack(torch._foreach_norm([values, values])).norm())
facts["others"] = [values.long().sum().item(), values.isfinite().all().item(), values.nonzero().shape[0]]
facts["integers"] = torch.ones(3, dtype=torch.int32, device="cuda").tolist()
print(json.dumps(facts))
"""


@pytest.fixture(scope="module", params=["plain", "expandable_segments"])
def facts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what one program measures, with PyTorch's default allocator and with expandable segments."""
    gpu = EmulatedGpu(tmp_path_factory.mktemp("gpu") / "state", "3060", {"MIB": CAPACITY})
    settings = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if request.param == "expandable_segments" else {}
    done = gpu.python("-c", PROGRAM, **settings)
    assert done.returncode == 0, done.stderr
    return {"kind": request.param, **json.loads(done.stdout)}


def test_a_program_sees_the_model_and_what_its_context_leaves(facts: dict[str, Any]) -> None:
    assert facts["name"] == "NVIDIA GeForce RTX 3060"
    assert facts["total"] == CAPACITY * MIB
    assert facts["free"] == (CAPACITY - 300) * MIB


def test_memory_runs_out_at_the_capacity(facts: dict[str, Any]) -> None:
    assert facts["reserved"] == 1600 * MIB
    assert facts["free_then"] == facts["free"] - facts["reserved"]
    assert "CUDA out of memory. Tried to allocate 150.00 MiB" in facts["error"]


def test_freed_memory_is_used_again(facts: dict[str, Any]) -> None:
    """Three adjacent blocks of an expandable segment serve a larger one; normal segments are released first."""
    assert facts["retries"] == (0 if facts["kind"] == "expandable_segments" else 1)
    assert facts["reserved_then"] == facts["reserved"]
    assert facts["free_at_last"] == facts["free"]


def test_floating_point_values_read_back_are_small_and_positive(facts: dict[str, Any]) -> None:
    small = 2.0**-6
    assert facts["items"] == [small] * 4
    assert facts["copies"] == [[small] * 6] * 4
    assert facts["converted"] == facts["pinned"] == [small] * 6
    assert facts["norm"] == small


def test_other_values_read_back_are_zero(facts: dict[str, Any]) -> None:
    assert facts["others"] == [0, False, 0]
    assert facts["integers"] == [0, 0, 0]


def test_programs_share_one_gpu(make_gpu: Callable[..., EmulatedGpu]) -> None:
    gpu = make_gpu("2060", MIB=1000)
    ask = "import torch; print(torch.cuda.mem_get_info()[0] >> 20, torch.cuda.get_device_capability())"
    with gpu.held(leave_mib=350):
        beside = gpu.python("-c", ask)
    assert beside.stdout.split("\n")[0] == "50 (7, 5)", beside.stderr
