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
