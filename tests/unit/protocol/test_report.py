import json

import pytest

from trainer.protocol.report import CachingReport, Memory, PhaseReport, RunReport, read_report, write_report

REPORT = RunReport(
    gpu="NVIDIA GeForce RTX 3060",
    system="Windows",
    versions={"torch": "2.13.0", "driver": "581.15"},
    seconds=1200.5,
    forecast_seconds=1100.0,
    images_per_second=0.7,
    flops_per_second=9.9e12,
    share_of_limit=0.39,
    phases={
        "train": PhaseReport(1000.0, Memory(10, 12), 950.0, Memory(11, 12, 20), 0),
        "save": PhaseReport(1.0),
    },
    time_factor=1.1,
    caching={"cache_pictures": CachingReport(240, 31.0, 22.0, 8.1, 400.0)},
)


def test_a_report_is_read_back_as_written(tmp_path):
    write_report(tmp_path / "report.json", REPORT)
    assert read_report(tmp_path / "report.json") == REPORT


def test_keys_of_a_newer_version_are_passed_over(tmp_path):
    write_report(tmp_path / "report.json", REPORT)
    found = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    found["watts"] = 170
    found["phases"]["train"]["measured"]["shared"] = 0
    (tmp_path / "report.json").write_text(json.dumps(found), encoding="utf-8")
    assert read_report(tmp_path / "report.json") == REPORT


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"phases": {"train": 3}}', '{"phases": 3}', "\x00"])
def test_what_is_no_report_is_a_value_error(tmp_path, text):
    (tmp_path / "report.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError):
        read_report(tmp_path / "report.json")
