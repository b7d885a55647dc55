"""Which card a run takes and how it is described, with PyTorch's and the driver's answers written here."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from trainer import gpu
from trainer.config.job import Job
from trainer.errors import ImpastoError
from trainer.training.device import device as machine

GIB = 1 << 30
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
UUID = "6f8ab3e1-3c40-5d9b-9a52-c9b1b7f0000{}"


def listed(number, free):
    """A card as the driver lists it."""
    return gpu.Gpu(number, "GPU-" + UUID.format(number), f"Card {number}", 8 * GIB, free, "581.15", (13, 0), (7, 5), ())


@pytest.fixture
def two_cards(monkeypatch):
    """PyTorch counts them the other way round than the driver does."""
    cuda, present = torch.cuda, [0]
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: 2)
    seen = [
        SimpleNamespace(uuid=UUID.format(1), name="Torch 0", major=7, minor=5),
        SimpleNamespace(uuid=UUID.format(0), name="Torch 1", major=8, minor=6),
    ]
    monkeypatch.setattr(cuda, "get_device_properties", seen.__getitem__)
    monkeypatch.setattr(cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(cuda, "_exchange_device", partial(exchange, present), raising=False)
    monkeypatch.setattr(cuda, "_maybe_exchange_device", partial(exchange, present), raising=False)
    monkeypatch.setattr(cuda, "mem_get_info", lambda index: ((3 + index) * GIB, 12 * GIB))
    monkeypatch.setattr(gpu, "list_gpus", lambda: [listed(0, 2 * GIB), listed(1, 7 * GIB)])
    monkeypatch.setenv(WORKSPACE, "anything")  # so that it is put back afterwards
    monkeypatch.delenv(WORKSPACE)
    return present


def exchange(present, index):
    """As PyTorch does where it was built for CUDA: the former present card, which another takes the place of."""
    former, present[0] = present[0], index
    return former


@pytest.mark.usefixtures("two_cards")
def test_the_card_with_most_free_memory_is_taken_as_the_driver_describes_it():
    found = machine.this_machine(None)
    assert (found.device, found.gpu, found.total_bytes, found.bf16) == ("cuda:0", "Card 1", 8 * GIB, False)
    assert machine.this_machine("cuda:1").gpu == "Card 0"


def broken():
    raise ImpastoError("gpu.driver", "The NVIDIA driver does not work.", "Restart.")


@pytest.mark.usefixtures("two_cards")
@pytest.mark.parametrize("cards", [list, broken])
def test_torch_describes_a_card_that_the_driver_does_not_list(monkeypatch, cards):
    monkeypatch.setattr(gpu, "list_gpus", cards)
    found = machine.this_machine(None)
    assert (found.device, found.gpu, found.total_bytes, found.bf16) == ("cuda:1", "Torch 1", 12 * GIB, True)


@pytest.mark.usefixtures("two_cards")
@pytest.mark.parametrize(
    ("deterministic", "before", "inside"),
    [(False, None, ":4096:2:16:8"), (True, None, ":4096:8"), (True, ":16:8", ":16:8")],
)
def test_the_workspace_of_cublas_is_stated_unless_the_user_did(monkeypatch, deterministic, before, inside):
    if before is not None:
        monkeypatch.setenv(WORKSPACE, before)
    with machine.numeric_settings(job_of(device="cuda:1", deterministic=deterministic)):
        assert machine.os.environ[WORKSPACE] == inside


def test_the_card_of_a_run_is_the_present_one_until_it_ends(two_cards):
    with pytest.raises(KeyError), machine.numeric_settings(job_of(device="cuda:1")):
        assert two_cards == [1]
        raise KeyError
    assert two_cards == [0]


@pytest.mark.parametrize("before", [False, True])
def test_a_deterministic_run_writes_nothing_to_memory_that_it_only_takes(
    before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", before)
    with machine.numeric_settings(job_of(deterministic=True)):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    assert torch.utils.deterministic.fill_uninitialized_memory is before


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_how_fp16_is_added_up_is_as_the_job_says_and_put_back(before: bool, inside: bool) -> None:
    products = torch.backends.cuda.matmul
    with machine.numeric_settings(job_of(fp16_accumulation=before)):
        with machine.numeric_settings(job_of(dtype="fp16", fp16_accumulation=inside)):
            assert products.allow_fp16_accumulation is inside
        assert products.allow_fp16_accumulation is before
    assert products.allow_fp16_accumulation is False


def job_of(**fit: object) -> Job:
    return Job.model_validate(
        {
            "schema": 1,
            "name": "x",
            "base": {"model": "base.safetensors"},
            "dataset": {"folders": [{"path": "pictures"}]},
            "fit": fit,
        }
    )
