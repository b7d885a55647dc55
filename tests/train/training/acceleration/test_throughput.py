"""The measured rate of this machine's CPU: sizes are met, the largest are chosen, and what is measured is plausible."""

import itertools
import time
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from trainer.memory.device.roofline import seconds
from trainer.memory.trace.memory_trace import Work
from trainer.training.acceleration import throughput
from trainer.training.acceleration.throughput import OperationSize, cpu_time, dominant_sizes, measure_rate, sample_calls

CPU = torch.device("cpu")


@pytest.fixture
def operation_timed_once():
    """Time operations in each test here, unlike in the tests of other files."""


def gemm(rows, inner, columns, item=4):
    return 2 * rows * inner * columns, item * (rows * inner + inner * columns + rows * columns)


def conv(places, channels, kernel, maps=2, item=4):
    return 2 * places * (channels * kernel) ** 2, item * (maps * places * channels + (channels * kernel) ** 2)


@pytest.mark.parametrize(
    ("kind", "stage", "dtype", "flops", "size"),
    [
        ("gemm", "forward", "float32", *gemm(1024, 64, 64)),
        ("gemm", "backward", "float32", *gemm(256, 128, 128)),
        ("gemm", "forward", "float32", *gemm(1024, 320, 16)),  # a LoRA's
        ("gemm", "forward", "bfloat16", *gemm(512, 64, 64, item=2)),
        ("conv", "forward", "float32", *conv(256, 32, 3)),
        ("conv", "forward", "float32", *conv(64, 128, 3)),
        ("conv", "forward", "float32", *conv(256, 64, 1)),
        ("conv", "backward", "float32", *conv(256, 64, 3, maps=3)),
    ],
)
def test_examples_compute_as_much_as_the_operations_they_stand_for(kind, stage, dtype, flops, size):
    """Counted by PyTorch, which knows nothing of how the shapes were found."""
    (example,) = sample_calls(OperationSize(kind, dtype, stage, flops, size), CPU)
    with FlopCounterMode(display=False) as counter:
        example()
    assert counter.get_total_flops() == pytest.approx(flops, rel=0.07)


@pytest.mark.parametrize(("stage", "products", "maps", "counted"), [("forward", 2, 4, 2), ("backward", 5, 8, 4)])
def test_attention_is_as_wide_and_long_as_its_flops_and_bytes_say(stage, products, maps, counted):
    """The plain kernel, which PyTorch can count, keeps the scores: backward computes one product less again."""
    heads, places, width = 2, 256, 64
    flops, size = 2 * products * heads * places**2 * width, 4 * maps * heads * places * width
    with sdpa_kernel(SDPBackend.MATH):
        (example,) = sample_calls(OperationSize("attention", "float32", stage, flops, size), CPU)
        with FlopCounterMode(display=False) as counter:
            example()
    assert counter.get_total_flops() == 2 * counted * heads * places**2 * width


@pytest.mark.parametrize("size", [4, 40, 4 << 10, 4 << 20])
def test_examples_that_move_memory_move_as_much(size):
    tensors = []

    class Bytes(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            tensors.append(sum(one.nbytes for one in (*args, result) if isinstance(one, torch.Tensor)))
            return result

    examples = sample_calls(OperationSize("other", "float32", "forward", 0, size), CPU)
    with Bytes():
        for example in examples:
            example()
    assert tensors == pytest.approx([size] * 3, rel=0.07, abs=16)


def test_shapes_are_found_again_where_operations_are_square():
    flops, size = conv(16 * 16, 96, 3)
    (example,) = sample_calls(OperationSize("conv", "float32", "forward", flops, size), CPU)
    assert example().shape == (1, 96, 16, 16)


def test_whatever_a_trace_counts_can_be_timed():
    """Sizes that no shape has exactly: nothing but flops, nothing but bytes, one number."""
    for kind in ("gemm", "conv", "attention", "other"):
        for flops, size in ((1, 4), (10**6, 4), (1, 10**6), (3, 7)):
            for stage in ("forward", "backward"):
                for example in sample_calls(OperationSize(kind, "float32", stage, flops, size), CPU):
                    example()
    for example in sample_calls(OperationSize("gemm", "uint8", "forward", *gemm(64, 64, 64, 2)), CPU):
        assert example().dtype == torch.bfloat16


def work(kind, flops, size, count=1, stage="forward"):
    return Work(kind, "float32", stage, flops, size, count)


def test_the_sizes_that_matter_most_are_timed():
    small = [work("gemm", 10**4 + number, 10**3) for number in range(30)]
    large = [work("gemm", 10**8, 10**5, 20), work("gemm", 10**7, 10**4, 300), work("gemm", 10**8, 10**5, 20)]
    moving = [work("other", 0, 10**6, 5), work("conv", 0, 2 * 10**6, 5)]
    chosen = dominant_sizes([*small, *large, *moving])
    assert [size.flops for size in chosen if size.kind == "gemm"] == [10**8, 10**7]
    assert sorted(size.bytes for size in chosen if size.kind == "other") == [10**6, 2 * 10**6]
    assert len(dominant_sizes(small)) == throughput.MAX_SIZES_PER_KIND


def test_this_cpu_is_measured_in_about_a_second():
    started = time.perf_counter()
    before = torch.get_num_threads(), torch.is_grad_enabled()
    measured = measure_rate(CPU, seconds=0.2)
    assert time.perf_counter() - started < 60  # however busy the machine is
    assert (torch.get_num_threads(), torch.is_grad_enabled()) == before
    assert {timed.kind for timed in measured.timed} == {"gemm", "conv", "attention", "other"}
    assert all(0 < timed.seconds < 1 for timed in measured.timed)
    assert measured.device == "cpu, 1 threads"
    assert 1e-7 < measured.launch < 1e-2
    assert measured.host == 0.0, "the CPU computes itself: there is nobody to run ahead of"


def test_what_is_measured_foretells_what_is_not():
    """A product sixteen times as large as the one that was timed: within a factor of six, as a core has neighbors."""
    measured = measure_rate(CPU, [work("gemm", *gemm(256, 256, 256)), work("other", 0, 3 << 20)], seconds=0.1)
    left, right, now = torch.randn(1024, 256), torch.randn(256, 1024), cpu_time()
    truth = []
    for _ in range(5):
        started = now()
        F.linear(left, right.T)
        truth.append(now() - started)
    foretold = seconds([work("gemm", *gemm(1024, 256, 1024))], measured) - measured.launch
    assert min(truth) / 6 < foretold < min(truth) * 6


def test_what_is_passed_over_before_each_operation_does_not_count(monkeypatch):
    """By a clock that is looked at by each pass twice."""
    ticks = itertools.count()
    now = partial(next, ticks)
    monkeypatch.setattr(throughput, "cpu_time", lambda: now)
    one = torch.zeros(1)

    def took() -> int:
        started = now()
        for _ in range(5):
            one + one
        return now() - started

    assert throughput._seconds_after_passes(64, took) == took() + 5 == 6


def test_one_slow_try_does_not_change_what_the_passes_cost(monkeypatch):
    """Nor a quick one: of eleven pairs the middle difference counts, here three seconds."""
    waits = {
        throughput._CACHE: itertools.chain([90], itertools.repeat(8)),
        0: itertools.chain([1, 8], itertools.repeat(5)),
    }
    monkeypatch.setattr(throughput, "_seconds_after_passes", lambda size, took: next(waits[size]))
    assert throughput._eviction_seconds(lambda: 0.0) == 3


def test_the_cost_of_an_operation_is_that_of_a_real_step():
    """Not that of a bare call: modules and autograd cost several times as much."""
    one = torch.zeros(1)
    now = cpu_time()
    bare = []
    for _ in range(50):
        started = now()
        one + one
        bare.append(now() - started)
    assert throughput._operation_seconds(CPU, 1) > 2 * min(bare)
