"""The losses of tiny runs are those of the golden file."""

import json
from pathlib import Path

import pytest

from tests.golden.losses import FILE, RUNS, losses_of

GOLDEN = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", RUNS)
def test_losses_have_not_moved(name: str, tmp_path: Path) -> None:
    """Processors round differently, by far less than 1e-4 over six steps."""
    assert losses_of(name, tmp_path) == pytest.approx(GOLDEN[name], rel=1e-4)
