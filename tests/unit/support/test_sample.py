"""The samples of long tests that the date chooses."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import date, timedelta

import pytest

from tests.support import ROOT
from tests.support.sample import places_of


@pytest.mark.parametrize(("most", "total"), [(1, 1), (2, 37), (3, 8), (5, 5), (4, 17)])
def test_every_case_has_its_day_and_no_day_has_too_many(most: int, total: int) -> None:
    days = [set(places_of(date(2026, 11, 27) + timedelta(number), most, total)) for number in range(-(-total // most))]
    assert set.union(*days) == set(range(total))
    assert all(1 <= len(places) <= most for places in days)


def test_benchmarks_that_use_it_start_without_a_date() -> None:
    """As CONTRIBUTING describes them: only tests set the date."""
    environment = {name: value for name, value in os.environ.items() if name != "IMPASTO_SAMPLE_DATE"}
    code = "import tests.support.sample"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
