"""Fixtures of the tests on an emulated NVIDIA GPU, which `python run.py test --gpu` runs; README.md describes it.

A test uses `emulated_gpu` (its own RTX 3060) or `make_gpu` (any model and size), and runs programs on it:

    def test_something(emulated_gpu, tiny_job):
        result = emulated_gpu.trainer("train", tiny_job("sd15"), SOME_VARIABLE="1")
        assert result.returncode == 0, result.stderr
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.emulated_gpu.machine import EmulatedGpu
from tests.support.jobs import photographs, write_job

HERE = Path(__file__).parent


def _is_emulated() -> bool:
    try:
        return hasattr(ctypes.CDLL("libcudart.so.13"), "emulated_gpu_count")
    except OSError:
        return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder unless the emulated GPU is loaded, even on a real GPU."""
    if not _is_emulated():
        for item in items:
            if item.path.is_relative_to(HERE):
                item.add_marker(pytest.mark.skip(reason="needs the emulated GPU: run python run.py test --gpu"))


@pytest.fixture
def make_gpu(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., EmulatedGpu]:
    """Make an emulated GPU: `make_gpu("2060", MIB=3000)` is an RTX 2060 with 3000 MiB for programs."""

    def make(model: str = "3060", **settings: object) -> EmulatedGpu:
        return EmulatedGpu(tmp_path_factory.mktemp("gpu") / "state", model, settings)

    return make


@pytest.fixture
def emulated_gpu(make_gpu: Callable[..., EmulatedGpu]) -> EmulatedGpu:
    """Return an RTX 3060 with 12 GB."""
    return make_gpu()


@pytest.fixture(scope="session")
def base_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Path]:
    """Make the tiny base of a family, once per session."""
    # Imported here and not in a test, because the import sets an environment variable.
    from tests.support.tiny import tiny_base

    folder = tmp_path_factory.mktemp("bases ü")
    return lambda family: tiny_base(family, folder, depth=1)


@pytest.fixture
def tiny_job(tmp_path: Path, base_of: Callable[[Any], Path]) -> Callable[..., Path]:
    r"""Write a job that trains a tiny base on six photographs for six steps on the GPU.

    `tiny_job("sdxl", extra='[output]\n...')`: `extra` is TOML that is appended; the job is `job.toml` in `tmp_path`.
    """

    def write(family: Any = "sd15", **options: Any) -> Path:
        job = write_job(tmp_path, base_of(family), photographs(tmp_path / "images"), **options)
        text = job.read_text(encoding="utf-8").replace('device = "cpu"', 'device = "cuda"')
        job.write_text(text, encoding="utf-8")
        return job

    return write
