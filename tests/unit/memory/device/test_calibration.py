import itertools
import json
import threading
from dataclasses import asdict, replace

import pytest

from trainer.memory.device import calibration
from trainer.memory.device.calibration import Correction, Excess, calibration_file, corrections, learn
from trainer.protocol.report import Memory, PhaseReport, RunReport

MIB = 1 << 20
GIB = 1 << 30
CARD, SYSTEM, VERSIONS = "NVIDIA GeForce RTX 3060", "Windows", {"torch": "2.13.0"}
DAY = 86_400.0


def phase(forecast=8 * GIB, measured=8 * GIB, device=None, shortfall=0, seconds=100.0, forecast_seconds=100.0):
    return PhaseReport(
        seconds, Memory(forecast, forecast), forecast_seconds, Memory(measured, measured, device), shortfall
    )


def report(card=CARD, system=SYSTEM, torch="2.13.0", time_factor=1.0, **phases):
    return RunReport(
        gpu=card,
        system=system,
        versions={"torch": torch},
        seconds=200.0,
        forecast_seconds=100.0,
        images_per_second=1.0,
        flops_per_second=None,
        share_of_limit=None,
        phases=phases,
        time_factor=time_factor,
    )


def known():
    return corrections(CARD, SYSTEM, VERSIONS)


def test_without_evidence_the_margin_is_three_per_cent_and_256_mib():
    found = known()
    assert found == Correction()
    margin = found.margin(8 * GIB)
    assert (margin.bytes, margin.reason) == (pytest.approx(0.03 * 8 * GIB + 256 * MIB, abs=1), "no_runs")
    assert found.time_factor == 1.0
    assert found.context_bytes is None


def test_the_margin_shrinks_as_runs_agree_and_is_halved_on_its_way_after_five():
    margins = []
    for _ in range(6):
        margins.append(known().margin(8 * GIB).bytes)
        assert learn(report(train=phase())) is None
    assert margins == sorted(set(margins), reverse=True)
    last = 0.005 * 8 * GIB + 64 * MIB
    assert margins[5] - last == pytest.approx((margins[0] - last) / 2, abs=2)
    assert (known().runs, known().margin(8 * GIB).reason) == (6, "runs")


@pytest.mark.parametrize("reserved", [0, 1, 3 * GIB, 24 * GIB])
@pytest.mark.parametrize("ran_out", [False, True])
def test_the_margin_is_monotone_and_covers_the_worst_error_up_to_its_limit(reserved, ran_out):
    """A shortage has no limit, and any other error one of 15 %."""

    def margin(n, share, size, reserved=reserved):
        error = {"shortage" if ran_out else "worst": Excess(share, size)}
        return Correction(runs=n, **error).margin(reserved).bytes

    runs, shares, sizes = (0, 1, 2, 7, 1000), (0.0, 0.01, 0.2), (0, MIB, 5 * GIB)
    for n, share, size in itertools.product(runs, shares, sizes):
        found, error = margin(n, share, size), max(share * reserved, size, int(0.005 * reserved))
        assert found >= (error if ran_out else min(error, int(0.15 * reserved)))
        assert ran_out or found <= max(0.15 * reserved, margin(n, 0.0, 0))
        assert margin(n + 1, share, size) <= found <= margin(n, share + 0.1, size + MIB)
        assert found <= margin(n, share, size, reserved + GIB)


def test_one_bad_run_holds_the_margin_up_however_many_good_ones_follow():
    learn(report(train=phase(forecast=10 * GIB, measured=11 * GIB)))
    for _ in range(20):
        learn(report(train=phase(), preview=phase()))
    found = known()
    assert found.worst == Excess(0.1, GIB)
    assert (found.margin(20 * GIB).bytes, found.margin(20 * GIB).reason) == (2 * GIB, "excess")
    assert (found.margin(9 * GIB).bytes, found.margin(9 * GIB).reason) == (GIB, "excess")
    assert (found.margin(5 * GIB).bytes, found.margin(5 * GIB).reason) == (5 * GIB * 15 // 100, "limit")


def test_an_error_of_more_than_the_limit_never_takes_a_gpu_away():
    """Half a GPU was once kept free for ever because a run had held on to what its training had cached."""
    learn(report(train=phase(6 * GIB, 6 * GIB), checkpoint=phase(2 * GIB, 6 * GIB)))
    margin = known().margin(11 * GIB)
    assert (margin.bytes, margin.reason) == (11 * GIB * 15 // 100, "limit")


def test_a_phase_is_measured_by_its_own_forecast_and_weighed_by_the_highest():
    """80 MiB more while captions are encoded are 1 % of a run of 8 GiB, not 40 % of any."""
    learn(report(cache_texts=phase(200 * MIB, 280 * MIB), train=phase(8000 * MIB, 7000 * MIB)))
    assert known().worst == Excess(0.01, 80 * MIB)
    assert known().margin(8 * GIB).reason == "runs"


def test_memory_that_was_asked_for_and_not_had_counts_as_needed():
    learn(report(train=phase(forecast=8 * GIB, measured=8 * GIB, shortfall=2 * GIB)))
    assert (known().worst, known().shortage) == (Excess(), Excess(0.25, 2 * GIB))
    margin = known().margin(8 * GIB)
    assert (margin.bytes, margin.reason) == (2 * GIB, "shortage")


def test_a_gpu_that_another_program_filled_says_nothing_of_the_forecast():
    learn(report(train=phase(forecast=8 * GIB, measured=2 * GIB, shortfall=GIB)))
    assert (known().worst, known().shortage) == (Excess(), Excess())


def test_what_was_forecast_too_high_asks_for_no_margin():
    learn(report(train=phase(forecast=9 * GIB, measured=8 * GIB)))
    assert known().worst == Excess()


def test_a_file_of_the_first_schema_is_not_read_and_replaced_without_a_word():
    """Its runs were compared with forecasts that gave back what runs keep, and so kept half a GPU free."""
    poisoned = asdict(report(checkpoint=phase(2 * GIB, 6 * GIB, device=7 * GIB)))
    calibration_file().write_text(json.dumps({"schema": 1, "runs": [poisoned]}), encoding="utf-8")
    assert known() == Correction()
    assert learn(report(train=phase())) is None
    assert (known().runs, known().worst, known().damage) == (1, Excess(), None)
    assert not calibration_file().with_suffix(".damaged.json").exists()


def test_the_context_is_the_most_that_was_held_outside_the_allocator():
    learn(report(load=phase(device=8 * GIB + 300 * MIB), train=phase(device=8 * GIB + 320 * MIB), save=phase()))
    learn(report(train=phase(device=8 * GIB + 310 * MIB)))
    assert known().context_bytes == 320 * MIB
    assert corrections("another", SYSTEM, VERSIONS) == corrections(CARD, "Linux", VERSIONS) == Correction()


def long(seconds, time_factor=1.0):
    """A run that was forecast to take a day, and took so many seconds."""
    return report(time_factor=time_factor, train=phase(seconds=seconds, forecast_seconds=DAY))


def test_time_is_corrected_towards_what_was_measured_with_earlier_corrections_undone():
    learn(long(4 * DAY))
    assert known().time_factor == pytest.approx(2.0, rel=1e-3)  # the forecast itself counts for one run
    learn(long(2 * DAY, time_factor=2.0))
    assert known().time_factor == pytest.approx(4 ** (2 / 3), rel=1e-3)
    for _ in range(60):
        learn(long(2 * DAY, time_factor=2.0))
    assert known().time_factor == pytest.approx(4.0, rel=0.05)


@pytest.mark.parametrize("forecast", [0.35, 97.0])
def test_a_run_of_seconds_teaches_little_about_time(forecast):
    learn(report(train=phase(seconds=6.0, forecast_seconds=forecast)))
    weight = 6 / 66
    assert known().time_factor == pytest.approx((6 / forecast) ** (weight / (weight + 1)))
    assert 0.75 < known().time_factor < 1.3


def test_time_without_phases_is_that_of_the_whole_run_and_absurd_factors_are_held_back():
    learn(report())
    weight = 200 / 260
    assert known().time_factor == pytest.approx(2 ** (weight / (weight + 1)))
    for _ in range(20):
        learn(long(1e4 * DAY))
    assert known().time_factor == 10.0


def test_another_version_of_torch_is_heeded_but_not_trusted():
    learn(report(torch="2.12.0", train=phase(measured=9 * GIB, device=10 * GIB)))
    found = known()
    assert (found.runs, found.context_bytes, found.worst.bytes) == (0, GIB, GIB)
    learn(report(train=phase(device=8 * GIB + 300 * MIB)))
    found = known()
    assert (found.runs, found.context_bytes, found.worst.bytes) == (1, 300 * MIB, GIB)


def test_runs_on_the_cpu_teach_time_only():
    learn(report(card="cpu", train=PhaseReport(1.5 * DAY, None, DAY)))
    found = corrections("cpu", SYSTEM, VERSIONS)
    assert (found.context_bytes, found.worst) == (None, Excess())
    assert found.time_factor == pytest.approx(1.5**0.5, rel=1e-3)


def test_only_the_newest_runs_and_the_worst_are_kept():
    learn(report(train=phase(measured=9 * GIB)))
    learn(report(card="other"))
    for _ in range(calibration.KEPT + 5):
        learn(report(train=phase()))
    runs = json.loads(calibration_file().read_text(encoding="utf-8"))["runs"]
    assert len(runs) == calibration.KEPT + 2
    assert known().worst.bytes == GIB


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"schema": 2}', '{"schema": 2, "runs": 3}', '{"schema": 3, "runs": []}', "[" * 100_000]
)
def test_a_damaged_file_is_told_of_put_aside_and_begun_anew(text):
    calibration_file().write_text(text, encoding="utf-8")
    found = known()
    assert replace(found, damage=None) == Correction()
    assert str(calibration_file()) in found.damage
    assert learn(report(train=phase())) is None
    assert known().runs == 1
    assert known().damage is None
    assert calibration_file().with_suffix(".damaged.json").read_text(encoding="utf-8") == text


def test_a_file_that_is_not_text_is_damaged():
    calibration_file().write_bytes(b"\xff\xfe\x00")
    assert "damaged" in known().damage


@pytest.mark.parametrize("wrong", [None, 3, {}, {"card": CARD}, {"phases": {"train": {"seconds": "x"}}}])
def test_entries_that_cannot_be_read_do_not_hide_the_others(wrong):
    learn(report(train=phase(measured=9 * GIB)))
    file = json.loads(calibration_file().read_text(encoding="utf-8"))
    if isinstance(wrong, dict) and "phases" in wrong:
        wrong = {**file["runs"][0], "phases": {"train": {**file["runs"][0]["phases"]["train"], "seconds": "x"}}}
    file["runs"].append(wrong)
    calibration_file().write_text(json.dumps(file), encoding="utf-8")
    found = known()
    assert (found.runs, found.worst.bytes) == (1, GIB)
    assert "1 of the 2 finished runs" in found.damage
    learn(report(train=phase()))
    assert (known().runs, known().damage) == (2, None)


def test_a_folder_that_cannot_be_written_is_told_not_raised(per_user_folder, monkeypatch):
    (per_user_folder / "file").write_bytes(b"")
    monkeypatch.setenv("IMPASTO_HOME", str(per_user_folder / "file"))
    assert "Could not update the forecast calibration" in learn(report(train=phase()))


def test_runs_that_end_at_once_all_count():
    threads = [threading.Thread(target=learn, args=(report(train=phase()),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert known().runs == 8
