"""Any sequence of edits, undo, redo, crashes, other programs' writes and refusing disks: disk equals the model."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.support.app_captions import Captions


def test_disk_equals_the_model_after_any_sequence() -> None:
    # The campaign `python -m tests.faults.captions` plays a hundred thousand of these.
    run_state_machine_as_test(
        Captions,
        settings=settings(
            max_examples=60,
            stateful_step_count=15,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
