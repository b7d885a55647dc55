import os

import pytest

from trainer import gpu
from trainer.memory.allocator.settings import AllocatorSettings
from trainer.memory.device.device_state import state_of_listed_gpu, state_of_local_gpu
from trainer.memory.device.gpu_specs import cublas_workspace_bytes, find_gpu, known_gpus, overheads_for

MIB = 1 << 20
GIB = 1 << 30


@pytest.mark.parametrize(
    ("capability", "deterministic", "asked", "size"),
    [
        ((8, 6), False, None, 8_519_680),  # recorded on real consumer cards
        ((9, 0), False, None, 33_554_432),  # recorded on Hopper
        ((12, 0), False, None, 33_554_432),
        ((8, 6), True, None, 33_554_432),
        ((8, 6), False, ":16:8", 131_072),
        ((8, 6), False, "rubbish", 8_519_680),
    ],
)
def test_the_workspace_of_cublas_is_what_a_run_or_the_user_states(capability, deterministic, asked, size):
    environment = {} if asked is None else {"CUBLAS_WORKSPACE_CONFIG": asked}
    assert cublas_workspace_bytes(capability, deterministic=deterministic, environment=environment) == size


@pytest.mark.parametrize(
    ("name", "free"),
    [("RTX 3060", 10.98), ("8GB", 7.2)],
)
def test_what_windows_leaves_free_is_as_seen_on_real_machines(name, free):
    card = find_gpu(name)
    left = card.total_bytes - overheads_for(card, "Windows").desktop_bytes
    assert left / GIB == pytest.approx(free, abs=0.1)


def test_windows_takes_more_than_linux_and_cards_without_a_screen_have_no_desktop():
    card, rented = find_gpu("RTX 4090"), find_gpu("A100")
    assert overheads_for(card, "Windows").desktop_bytes > overheads_for(card, "Linux").desktop_bytes > 512 * MIB
    assert overheads_for(rented, "Windows").desktop_bytes == overheads_for(rented, "Linux").desktop_bytes
    assert overheads_for(rented, "Linux").desktop_bytes == pytest.approx(0.02 * rented.total_bytes, rel=1e-6)


def test_every_card_has_overheads_within_what_was_ever_seen():
    for card in known_gpus():
        for system in ("Windows", "Linux"):
            found = overheads_for(card, system)
            assert 0.1 * GIB < found.context_bytes < 0.6 * GIB
            assert found.desktop_bytes < max(0.15 * card.total_bytes, 0.81 * GIB)
            assert found.cublas_workspace_bytes in (8_519_680, 33_554_432)
            assert 0.0 <= found.cudnn_workspace_share <= 1.0
            assert all(found.sources.values())


def test_determinism_is_reckoned_with():
    card = find_gpu("RTX 3060")
    assert overheads_for(card, "Linux", deterministic=True).cublas_workspace_bytes == 32 * MIB


def test_only_a_card_that_is_here_has_its_allocator_set_by_the_environment(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    card = gpu.Gpu(0, "GPU-0", "NVIDIA GeForce RTX 3060", 12 * GIB, 9 * GIB, "581.15", (13, 0), (8, 6), ())
    assert state_of_local_gpu(card).allocator.max_split_size == 64 * MIB
    assert state_of_listed_gpu(find_gpu("RTX 3060")).allocator == AllocatorSettings()


def test_what_this_process_holds_already_counts_as_free():
    """The forecast adds the context; where the driver does not say its size, the forecast's own figure cancels out."""
    uses = (gpu.GpuProcess(os.getpid(), "python", 320 * MIB, "compute"), gpu.GpuProcess(1, "blender", GIB, "graphics"))
    card = gpu.Gpu(0, "GPU-0", "NVIDIA GeForce RTX 3060", 12 * GIB, 9 * GIB, "581.15", (13, 0), (8, 6), uses)
    assert [use.name for use in state_of_local_gpu(card).uses] == ["blender"]
    assert state_of_local_gpu(card, own=320 * MIB).free_bytes == 9 * GIB + 320 * MIB
    unknown = state_of_local_gpu(card, own=None)
    assert unknown.free_bytes - unknown.outside == 9 * GIB
