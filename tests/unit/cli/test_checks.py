import dataclasses

import pytest

from trainer import gpu
from trainer.cli import doctor
from trainer.host import MainMemory

GIB = 1 << 30
CARD = gpu.Gpu(0, "GPU-0", "RTX 3060", 12 * GIB, 11 * GIB, "581.15", (13, 0), (8, 6), (), load=3, temperature=41)


def changed(**facts):
    return dataclasses.replace(CARD, **facts)


def test_a_card_is_told_with_how_it_is():
    check = doctor.check_gpu(CARD)
    assert check.verdict == "ok"
    assert check.sentence.endswith("11.0 GiB of 12.0 GiB free, compute capability 8.6, bf16, Ampere, 41 °C, 3% busy")
    silent = doctor.check_gpu(changed(load=None, temperature=None, capability=(7, 5)))
    assert silent.sentence.endswith("7.5, fp16 only, Turing")


def test_a_hot_card_is_doubtful():
    assert doctor.check_gpu(changed(temperature=84)).verdict == "ok"
    check = doctor.check_gpu(changed(temperature=85))
    assert (check.verdict, "clean" in check.remedy) == ("doubtful", True)


def test_a_busy_card_is_doubtful():
    assert doctor.check_uses(changed(load=49)).verdict == "ok"
    assert "50% busy" in doctor.check_uses(changed(load=50)).remedy
    assert doctor.check_uses(changed(load=None)).verdict == "ok"


def test_who_uses_a_card_is_told_the_largest_first_also_without_sizes():
    uses = (gpu.GpuProcess(1, "game.exe", 7 * GIB, "graphics"), gpu.GpuProcess(2, "dwm.exe", None, "graphics"))
    check = doctor.check_uses(changed(free_bytes=3 * GIB, uses=uses))
    assert (check.verdict, check.sentence) == ("doubtful", "GPU 0 is used by: game.exe 7.0 GiB, dwm.exe")
    assert check.remedy == "Close programs that you do not need: game.exe uses 7.0 GiB."
    windows = doctor.check_uses(changed(free_bytes=3 * GIB, uses=uses[1:]))
    assert windows.remedy == "Close programs that you do not need."
    assert doctor.check_uses(CARD).sentence == "GPU 0 is used by: no program that the driver reports"


def test_what_cuda_leaves_is_judged_by_what_is_usual_there():
    assert doctor.check_context(CARD, GIB // 2, GIB).verdict == "ok"
    check = doctor.check_context(changed(free_bytes=5 * GIB), GIB // 2, GIB)
    assert check.verdict == "doubtful"
    assert "4.5 GiB are left for the model (typically 10.5 GiB)" in check.sentence


@pytest.mark.parametrize(
    ("free", "verdict", "larger"), [(18, "ok", ""), (17, "doubtful", "at least 1 GiB"), (2, "doubtful", "16 GiB")]
)
def test_windows_must_be_able_to_promise_a_full_card_and_what_training_needs(free, verdict, larger):
    """12 GiB of card and 6 of main memory."""
    check = doctor.check_commit(MainMemory(32 * GIB, 16 * GIB, 64 * GIB, free * GIB), [CARD])
    assert check.verdict == verdict
    assert larger in check.remedy


def test_without_a_limit_or_a_card_there_is_no_promise_to_judge():
    assert doctor.check_commit(MainMemory(32 * GIB, 16 * GIB), [CARD]) is None
    assert doctor.check_commit(MainMemory(32 * GIB, 16 * GIB, 64 * GIB, GIB), []) is None


@pytest.mark.parametrize(
    ("driver", "sentence", "remedy"),
    [
        ("531.79", "does not use main memory instead", ""),
        ("536.23", "does not use main memory instead", ""),
        ("536.40", "uses main memory when the GPU is full", "from 546.01 on"),
        ("546.01", "uses main memory when the GPU is full", "Prefer No Sysmem Fallback"),
        ("581.15", "stays below the free memory", "Nothing to do"),
    ],
)
def test_what_the_windows_driver_does_with_a_full_card_is_told(driver, sentence, remedy):
    check = doctor.check_spilling(driver, "Windows")
    assert check.verdict == "ok"
    assert sentence in check.sentence
    assert remedy in check.remedy


def test_elsewhere_no_driver_spills():
    assert doctor.check_spilling("581.15", "Linux") is None
    assert doctor.check_spilling("unknown", "Windows") is None
