from dataclasses import replace

import pytest

from trainer.memory.device.gpu_specs import find_gpu, known_gpus
from trainer.memory.device.roofline import loading_seconds, rate_of, seconds
from trainer.memory.trace.memory_trace import Work
from trainer.protocol.forecast import DeviceSpeed, TimedOperation

GIB = 1 << 30


def rate(host=0.0, launch=0.0, **timed):
    """A device of 1 TFLOP/s for matrices in bf16, half of it for other formats' and convolutions, and 100 GB/s."""
    pieces = (
        TimedOperation("gemm", "bfloat16", 1e12, 1.0, 1.0),
        TimedOperation("gemm", "float32", 1e12, 1.0, 2.0),
        TimedOperation("conv", "bfloat16", 1e12, 1.0, 2.0),
        TimedOperation("attention", "bfloat16", 1e12, 1.0, 1.0),
        TimedOperation("other", "float32", 0.0, 1e11, 1.0),
    )
    return DeviceSpeed("test", pieces, 1e11, launch, host)


def work(kind="gemm", flops=10**9, size=1, count=1, dtype="bfloat16"):
    return Work(kind, dtype, "forward", flops, size, count)


SMALL, LARGE = work(flops=10**6, count=1000), work(flops=10**12)


@pytest.mark.parametrize(
    ("pieces", "overheads", "expected"),
    [
        ([work()], {}, 1e-3),
        ([work(count=7)], {}, 7e-3),
        ([work(dtype="float32")], {}, 2e-3),
        ([work(dtype="uint8")], {}, 1e-3),  # nothing in that format was timed: as the nearest of the kind
        ([work("conv")], {}, 2e-3),
        ([work(size=10**9)], {}, 1e-2),  # more bytes than arithmetic
        ([work("other", 0, 10**9)], {}, 1e-2),
        ([work("gemm", 0, 10**9)], {}, 1e-2),  # a kind without arithmetic moves memory
        ([work(count=10)], {"launch": 1e-4}, 10 * 1.1e-3),  # every operation takes the device a moment
        ([SMALL], {"host": 1e-4}, 0.1),  # many small operations wait for the CPU
        ([SMALL, LARGE], {"host": 1e-4}, 1.001),  # the CPU runs ahead: it bounds the sum, it is not added
    ],
)
def test_operations_take_what_their_arithmetic_their_bytes_or_their_overheads_take(pieces, overheads, expected):
    assert seconds(pieces, rate(**overheads)) == pytest.approx(expected)


def test_the_most_similar_timing_is_taken():
    timed = (TimedOperation("gemm", "float32", 1e6, 1e4, 1e-4), TimedOperation("gemm", "float32", 1e9, 1e6, 1e-3))
    device = DeviceSpeed("test", (*timed, TimedOperation("other", "float32", 0.0, 1e6, 1e-3)), 1e12, 0.0, 0.0)
    assert seconds([work(flops=2 * 10**6, size=10**4, dtype="float32")], device) == pytest.approx(2e-4)
    assert seconds([work(flops=2 * 10**9, size=10**6, dtype="float32")], device) == pytest.approx(2e-3)


def test_loading_goes_by_the_disk():
    assert loading_seconds(10**9, rate()) == pytest.approx(2.0)


def test_table_cards_keep_the_order_of_their_data_sheets():
    """One micro-step of SDXL at 1024: 14.2 TFLOP in about 8,700 operations, some 60 GB moved between them."""
    pieces = [
        work("gemm", 9 * 10**9, 20 * 10**6, 1000),
        work("conv", 34 * 10**9, 30 * 10**6, 100),
        work("attention", 12 * 10**9, 20 * 10**6, 140),
        work("other", 0, 8 * 10**6, 7400),
    ]
    took = {name: seconds(pieces, rate_of(find_gpu(name), "Windows")) for name in ("3060", "3090", "4090", "A100")}
    assert took["3060"] > took["3090"] > took["4090"]
    assert took["4090"] == took["A100"] == pytest.approx(sum(piece.count for piece in pieces) * 35e-6)
    # The best speeds that users report of other trainers: 0.42 pictures a second on a 3060, 1.34 on a 3090.
    assert 0.42 < 1 / took["3060"] < 1.8
    assert 1.34 < 1 / took["3090"] < 5.0


def test_fp16_cards_compute_bf16_by_widening_it():
    turing = rate_of(find_gpu("RTX 2080"), "Windows")
    assert seconds([work(dtype="bfloat16")], turing) > 2 * seconds([work(dtype="float16")], turing)


@pytest.mark.parametrize(
    ("name", "quicker"), [("GTX 1080", 1), ("GTX 1660", 1), ("V100", 1), ("RTX 2060", 2), ("4090", 2)]
)
def test_cards_with_units_for_int8_multiply_it_twice_as_fast(name, quicker):
    card = rate_of(find_gpu(name), "Windows")
    rates = {timed.dtype: timed.flops for timed in card.timed if timed.kind == "gemm"}
    assert rates["int32"] == quicker * rates["int8"]


def test_every_card_has_a_rate_for_every_kind_and_format():
    for card in known_gpus():
        known = {(timed.kind, timed.dtype) for timed in rate_of(card, "Linux").timed}
        formats = ("float32", "float16", "bfloat16", "uint8")
        assert known >= {(kind, dtype) for kind in ("gemm", "conv", "attention") for dtype in formats}


@pytest.mark.parametrize(("link", "copied"), [(8 * 0.985e9, 6.5e9), (8 * 1.969e9, 13e9), (16 * 1.969e9, 25e9)])
def test_copies_reach_most_of_the_pcie_link(link, copied):
    """Measured copies from pinned memory: 6.5 GB/s on PCIe 3.0 with 8 lanes, 13 and 25 on PCIe 4.0 with 8 and 16."""
    here = rate_of(replace(find_gpu("RTX 3060"), bus=link), "Linux")
    elsewhere = rate_of(find_gpu("RTX 3060"), "Linux")
    assert here.bus == pytest.approx(copied, rel=0.04)
    assert elsewhere == replace(here, bus=pytest.approx(13e9, rel=0.04))  # as if in a slot with 8 lanes of PCIe 4.0
    windows = rate_of(replace(find_gpu("RTX 3060"), bus=link), "Windows")
    assert here.bus / windows.bus == pytest.approx(144.6 / 55.5, rel=0.04)  # milliseconds per swap, triton-windows#161
