"""A forecast comes back from its file as it was written; what is no forecast is none."""

from pathlib import Path

import pytest

from trainer.protocol.forecast import (
    Forecast,
    Peak,
    PhaseForecast,
    expected_step_seconds,
    read_forecast,
    write_forecast,
)

PEAK = Peak("backward of the first up block", "unet.up_blocks.0", "backward", 5, {"weights": 4}, (("unet", 4),))
FORECAST = Forecast(
    gpu="RTX 3060",
    phases=(PhaseForecast("load", 1, 2, 3, 0.5), PhaseForecast("train", 5, 6, 7, 8.5, (PEAK,), ((1, 2), (3, 4)))),
    allocated=5,
    reserved=6,
    outside=1,
    margin=1,
    budget=10,
    fits=True,
    seconds=9.0,
    step_seconds={"64x64": 0.1},
    flops=1e12,
)


def test_a_forecast_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "forecast.json"
    write_forecast(path, FORECAST)
    assert read_forecast(path) == FORECAST
    assert FORECAST.of("train") is FORECAST.phases[1] and FORECAST.of("preview") is None


@pytest.mark.parametrize(
    "text", [None, "", "[]", "{}", '{"phases": 3}', '{"phases": [{}]}', '{"phases": [], "card": 1}']
)
def test_what_is_no_forecast_is_none(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "forecast.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert read_forecast(path) is None


def test_the_forecast_gives_way_to_what_is_measured() -> None:
    assert expected_step_seconds(2.0, []) == 2.0
    assert expected_step_seconds(None, []) is None
    assert expected_step_seconds(None, [1.0, 3.0]) == 2.0
    assert expected_step_seconds(2.0, [1.0] * 5) == pytest.approx(1.5)
    assert expected_step_seconds(2.0, [1.0] * 95) == pytest.approx(1.05)
