"""What tests of training stand on: one thread and deterministic algorithms, so that equal means equal."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def deterministic_torch() -> Iterator[None]:
    """Sums in one order, and an error from any operation that cannot promise it."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def torch_left_as_found(deterministic_torch: None) -> Iterator[None]:
    """What a test changes for good decides over those after it, which are others on each core and machine."""
    yield
    flags = torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled(), torch.get_default_dtype()
    assert (torch.get_num_threads(), *flags) == (1, True, True, torch.float32), "a test has left PyTorch changed"
