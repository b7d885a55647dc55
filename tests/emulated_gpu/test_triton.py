"""Kernels that Triton compiles at run time, as compiled blocks use them: loaded, launched and counted."""

from __future__ import annotations

from pathlib import Path

from tests.emulated_gpu.machine import EmulatedGpu

PROGRAM = """
import torch, triton
import triton.language as tl

@triton.jit
def add_one(pointer, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(pointer + index, tl.load(pointer + index, mask=index < count) + 1, mask=index < count)

values = torch.zeros(1000, device="cuda")
add_one[(4,)](values, 1000, BLOCK=256)
print(values.sum().item())
"""


def test_a_triton_kernel_is_launched(emulated_gpu: EmulatedGpu, tmp_path: Path) -> None:
    program, report = tmp_path / "program.py", tmp_path / "report.txt"
    program.write_text(PROGRAM, encoding="utf-8")  # Triton reads a kernel's source from its file
    emulated_gpu.settings["REPORT"] = report
    done = emulated_gpu.python(program, TRITON_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert "kernel 1 add_one\n" in report.read_text(encoding="utf-8")
