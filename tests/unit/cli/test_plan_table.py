"""How plans are laid out for people: one screen, 80 columns, the figures of the forecast."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.remarks import every_advice, every_remark
from trainer import gpu
from trainer.cli import plan_text, words
from trainer.config.fit import FitConfig
from trainer.errors import JobError
from trainer.memory.device.calibration import Correction, Excess, calibration_file
from trainer.memory.device.device_state import state_of_listed_gpu
from trainer.memory.device.gpu_specs import find_gpu
from trainer.memory.planner.planner import PlanResult
from trainer.memory.planner.remarks import memory_advice
from trainer.protocol.forecast import Forecast, Peak, PhaseForecast
from trainer.protocol.plan import Remark

GIB = 1 << 30


def peak(name: str, allocated: float) -> Peak:
    kinds = {"weights": int(2.5 * GIB), "activations": int((allocated - 2.5) * GIB), "optimizer": 5 << 20}
    return Peak(name, "unet.mid_block", "backward", int(allocated * GIB), kinds, (("unet.mid_block", GIB),))


def phase(name: str, allocated: float, reserved: float, peaks: tuple[Peak, ...] = ()) -> PhaseForecast:
    samples = tuple((int(allocated * GIB * share / 40), int(reserved * GIB)) for share in range(41))
    return PhaseForecast(name, int(allocated * GIB), int(reserved * GIB), GIB, 4000.0, peaks, samples)  # type: ignore[arg-type]


def forecast(decisive: str = "train") -> Forecast:
    names = [f"backward through down block {number} of a UNet with many of them" for number in range(9)]
    peaks = tuple(peak(name, 3.0 + number / 10) for number, name in enumerate(names))
    preview = (peak("VAE decode of a 1024x1024 preview", 3.0), peak("rendering a preview: the UNet", 2.9))
    train, drawn = (5.0, 3.2) if decisive == "train" else (4.0, 6.9)
    phases = (
        phase("cache_pictures", 0.5, 0.6, (peak("VAE encode", 2.6),)),
        phase("first_step", 3.7, 4.4, peaks),
        phase("train", 3.8, train, peaks),
        phase("preview", 3.0, drawn, preview),
    )
    highest = max(one.reserved for one in phases)
    return Forecast("RTX", phases, phases[2].allocated, highest, 0, 0, int(6.6 * GIB), True, 12345.0, {"64x64": 2.0})


def test_the_timeline_is_one_screen_of_phases_and_named_peaks() -> None:
    lines = list(plan_text.timeline(forecast()))
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert lines[0].split() == ["PHASE", "IN", "USE", "RESERVED", "TIME"]
    train = next(line for line in lines if line.startswith("Train"))
    assert train.split()[1:9] == ["3.8", "GiB", "5.0", "GiB", "1", "h", "07", "min"] and train.endswith("peak")
    assert sum(line.endswith(" peak") for line in lines) == 1
    told = [line for line in lines if "backward through" in line]
    assert [line.split()[0] for line in told] == ["3.4", "3.5", "3.6", "3.7", "3.8"]  # the highest, in order of time
    below = lines[lines.index(told[0]) + 1]
    assert below.split(", ") == ["             weights 2.5 GiB", "activations 922 MiB"]  # what is small is left out


def test_what_happens_only_if_a_vae_is_damaged_is_told_with_what_it_takes() -> None:
    roomy, tight = (replace(forecast(), budget=budget * GIB) for budget in (8, 2))
    again = phase("cache_pictures", 2.0, 3.0)
    told = [" ".join(plan_text.encoded_again(again, found)) for found in (roomy, tight)]
    assert told[0].endswith('it encodes again in fp32: "Encode images" then takes 3.0 GiB.')
    assert told[1].endswith("then takes 3.0 GiB, which does not fit.")


def test_another_phase_that_decides_has_its_highest_peak_told() -> None:
    lines = list(plan_text.timeline(forecast("preview")))
    (drawn,) = [line for line in lines if line.startswith("Render previews")]
    assert drawn.endswith("peak") and "6.6 GiB" in drawn  # within the budget: what is free is given back
    assert lines.count("Peaks of this phase: Render previews") == 1
    assert [line.strip() for line in lines if line.endswith("preview")] == [
        "3.0 GiB  VAE decode of a 1024x1024 preview"
    ]
    assert plan_text.peak(forecast("preview")) == "Render previews, VAE decode of a 1024x1024 preview"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "1 s"),
        (89, "89 s"),
        (95, "2 min"),
        (3569, "59 min"),
        (3571, "1 h 00 min"),
        (5000, "1 h 23 min"),
        (11_100, "3 h 05 min"),
    ],
)
def test_foreseen_times_are_no_finer_than_they_can_be_known(seconds: float, text: str) -> None:
    assert words.duration_text(seconds) == text


@pytest.mark.parametrize(
    ("micro_batch", "batch", "text"),
    [
        (1, 1, "one image per step"),
        (2, 2, "both images at once"),
        (4, 4, "all 4 images at once"),
        (1, 4, "4 images one by one"),
        (2, 4, "4 images as 2 × 2"),
        (2, 5, "5 images in 3 parts of at most 2"),
    ],
)
def test_how_a_batch_is_computed(micro_batch: int, batch: int, text: str) -> None:
    assert plan_text.batches(FitConfig(micro_batch=micro_batch), batch) == text


@pytest.mark.parametrize(
    ("missing", "uses", "way", "advice"),
    [
        (0.9, (("steam", 1), ("game", 3), ("web", 2)), "close steam (1.0 GiB)", "or close steam (1.0 GiB)."),
        (1.9, (("steam", 1), ("game", 3), ("web", 2)), "close web (2.0 GiB)", "or close web (2.0 GiB)."),
        (4.0, (("steam", 1), ("game", 3), ("web", 2)), "close game, web (5.0 GiB)", "or close game, web (5.0 GiB)."),
        (
            2.9,
            (("game", None), ("web", None)),
            "free 3.0 GiB, for example by closing game, web",
            "by closing game, web.",
        ),
        (2.9, (), "free 3.0 GiB, or use a GPU with more memory", "Free 3.0 GiB, or use a GPU with more memory."),
        (5.9, (("game", 3), ("web", 2)), "use a GPU with more memory", "Use a GPU with more memory."),
    ],
)
def test_what_would_make_room(missing: float, uses: tuple[tuple[str, int | None], ...], way: str, advice: str) -> None:
    """Of 8 GiB others hold 6: no more can be freed; the margin takes 3 % of what is. No advice is given twice."""
    card = replace(find_gpu("RTX 3070"), total_bytes=8 * GIB)
    held = tuple(gpu.GpuProcess(number, name, size and size * GIB) for number, (name, size) in enumerate(uses))
    situation = replace(state_of_listed_gpu(card), free_bytes=2 * GIB, uses=held)
    assert plan_text.advice(memory_advice(int(missing * GIB), situation)) == way
    told = plan_text.what_would(None, situation, int(missing * GIB), 4)
    assert told.endswith(advice)
    assert told.count("se a GPU with more memory") == 1


@pytest.mark.parametrize(
    ("written", "how"),
    [
        ({}, "with any fit"),
        ({"dtype": "bf16", "threads": 2}, "with any fit"),
        ({"dtype": "fp32"}, "with the fit settings of the job"),
        ({"micro_batch": 2}, "with the fit settings of the job"),
        ({"preview_offload": False}, "with the fit settings of the job"),
    ],
)
def test_a_fit_counts_as_stated_only_where_another_might_take_less(written: dict[str, object], how: str) -> None:
    situation = state_of_listed_gpu(find_gpu("RTX 3070"))
    told = plan_text.nothing_fits(PlanResult(situation, None, excess_bytes=GIB), FitConfig.model_validate(written))
    assert told.startswith(f"It does not fit on RTX 3070 8GB {how}: it is 1.0 GiB too large for the ")


@pytest.mark.parametrize("free", [0.0, 0.3, 2.0])
def test_what_is_freed_suffices_and_no_byte_less(free: float) -> None:
    situation = replace(state_of_listed_gpu(find_gpu("RTX 3070")), free_bytes=int(free * GIB))
    wanted = situation.budget + GIB
    freed = situation.to_free(GIB)
    assert replace(situation, free_bytes=situation.free_bytes + freed).budget >= wanted
    assert replace(situation, free_bytes=situation.free_bytes + freed - 1).budget < wanted


RUN = {"worst": Excess(0.1, GIB), "runs": 3}


@pytest.mark.parametrize(
    ("correction", "why"),
    [
        (Correction(), "Margin: 563 MiB stays free because forecasts can be off (no run has finished here yet)."),
        (Correction(runs=5), "(5 runs finished here within their forecasts)"),
        (
            Correction(**RUN),
            "Margin: 1.0 GiB stays free because forecasts can be off (a finished run took 1.0 GiB more",
        ),
        (Correction(worst=Excess(0.5, 5 * GIB)), "Margin: 1.5 GiB stays free because forecasts can be off"),
        (Correction(worst=Excess(0.5, 5 * GIB)), "(a finished run took 5.0 GiB more than forecast; 15% is the limit)"),
        (
            Correction(shortage=Excess(0.2, GIB)),
            "Margin: 2.0 GiB stays free because forecasts can be off (a run ran out",
        ),
    ],
)
def test_the_margin_is_explained(correction: Correction, why: str) -> None:
    ahead = state_of_listed_gpu(find_gpu("RTX 3060"))
    situation = replace(ahead, free_bytes=10 * GIB + ahead.outside, correction=correction)
    assert why in plan_text.margin(situation)


def test_a_full_gpu_is_reported_with_its_programs() -> None:
    ahead = state_of_listed_gpu(find_gpu("RTX 3060"))
    programs = (gpu.GpuProcess(7, "python3", 11 * GIB), gpu.GpuProcess(8, "web", None))
    full = replace(ahead, free_bytes=ahead.outside, uses=programs)
    with pytest.raises(JobError) as raised:
        full.require_budget()
    assert "python3 (11.0 GiB), web" in raised.value.sentence and "300 MiB" in raised.value.sentence
    assert raised.value.remedy == "Close other programs that use the GPU, then try again."


def test_a_margin_that_takes_all_that_is_free_names_the_file_to_delete() -> None:
    ahead = state_of_listed_gpu(find_gpu("RTX 3060"))
    short = replace(ahead, correction=Correction(shortage=Excess(2.0, 20 * GIB)))
    with pytest.raises(JobError) as raised:
        short.require_budget()
    assert "GiB is kept free as a safety margin" in raised.value.sentence
    assert str(calibration_file()) in raised.value.remedy


def test_every_remark_and_advice_has_words() -> None:
    """A code without words raises KeyError here, before a user meets it; each sentence is written out in full."""
    told = {found: plan_text.remark(found) for found in every_remark()}
    assert all(text.endswith(".") and "{" not in text for text in told.values())
    assert set(plan_text.REMARKS) == {found.code for found in told}
    ways = [plan_text.advice(given) for given in every_advice()]
    assert len(set(ways)) == len(ways) and not any("{" in way for way in ways)
    with pytest.raises(ValueError, match="new"):
        Remark("new")
    with pytest.raises(ValueError, match="families"):
        Remark("base.assumed", {"families": "sd15"})
