"""What tests of training stand on: one thread and deterministic algorithms, so that equal means equal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from tests.support.exhaustion import SharedPlace


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


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> SharedPlace:
    """Where the runs of a file share bases and pictures; a file that wants more of it has a fixture of this name."""
    from tests.support.exhaustion import SharedPlace  # with all that trains, which few files need

    return SharedPlace(tmp_path_factory.mktemp("shared ü"))


@pytest.fixture
def shared_home(place: SharedPlace, per_user_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of the pictures, and what is encoded, is shared too: only the runs are each test's own."""
    monkeypatch.setenv("IMPASTO_HOME", str(place.folder / "home"))
