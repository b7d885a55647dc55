"""The sweep command queues a valid job for each combination, and shows what their runs recorded."""

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.support.jobs import write_job
from tests.support.written_runs import held, sample, write_frozen_job
from trainer.cli import main
from trainer.cli.job_sweep import combinations
from trainer.config.load import load_job
from trainer.errors import JobError
from trainer.protocol import events, places
from trainer.protocol.queue import Queue
from trainer.protocol.run_directory import RunDirectory


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Return a job file with relative paths and a comment."""
    path = write_job(tmp_path / "style", Path("base.safetensors"), Path("images"), name="style")
    path.write_text(path.read_text(encoding="utf-8").replace("rank = 4", "rank = 4  # small"), encoding="utf-8")
    return path


def finish(run: RunDirectory, losses: dict[int, float], *, held_out: bool, reserved: int | None) -> None:
    """Write the events of a run that validated with these losses, by step."""
    write_frozen_job(run)
    with held(run, 20) as writer:
        for step, loss in losses.items():
            fields = {"epoch": 1, "grad_norm": 1.0, "learning_rates": {}, "images": 1, "seconds": 1.0}
            writer.tell(events.StepEvent(step=step, loss=0.5, reserved=reserved, **fields))
            writer.tell(events.Validation(step=step, loss=loss, held_out=held_out, per_timestep={}))
        writer.tell(*(sample(run, 20, index) for index in range(2)))
        writer.tell(
            events.PhaseMemory(phase="train", seconds=1.0, allocated=None, reserved=None, device=None, host=7 << 20)
        )
        writer.stand("done", 20)


def test_every_combination_becomes_a_valid_job_in_the_queue(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks, schedules = "recipe.rank=8,16", "recipe.schedule.kind=constant,cosine"
    assert main(["sweep", str(job), "--set", ranks, "--set", schedules, "--set", "recipe.steps=9"]) == 0
    entries = Queue().entries()
    loaded = [load_job(job, text=entry.text) for entry in entries]
    assert [(one.recipe.rank, one.recipe.schedule.kind, one.recipe.steps) for one in loaded] == [
        (8, "constant", 9), (8, "cosine", 9), (16, "constant", 9), (16, "cosine", 9),
    ]  # fmt: skip
    assert [entry.name for entry in entries] == [one.name for one in loaded]
    assert loaded[0].name == "style-rank8-kindconstant-steps9"
    assert loaded[0].dataset.folders[0].path == str(tmp_path / "style" / "images")
    assert "rank = 8  # small" in (entries[0].text or "")
    assert "sweep style`" in capsys.readouterr().out
    assert main(["sweep", str(job), "--set", "recipe.rank=2,4"]) == 0
    assert len({entry.name for entry in Queue().entries()}) == 6  # the second sweep has another name
    capsys.readouterr()
    assert main(["sweep", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"sweeps": ["style", "style-2"]}


def test_names_of_other_trainers_are_said_and_set(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["network_dim=8,16", "lr_scheduler=constant_with_warmup,cosine", "recipe.steps=9"]
    assert main(["sweep", str(job), *(word for name in names for word in ("--set", name))]) == 0
    said = capsys.readouterr().err
    assert "network_dim is recipe.rank here: set recipe.rank = 8,16." in said
    assert "set recipe.schedule.kind = constant,cosine." in said and "recipe.steps is" not in said
    loaded = [load_job(job, text=entry.text).recipe for entry in Queue().entries()]
    assert {(one.rank, one.schedule.kind) for one in loaded} == {
        (8, "constant"), (8, "cosine"), (16, "constant"), (16, "cosine"),
    }  # fmt: skip
    assert main(["sweep", str(job), "--set", "gradient_accumulation_steps=1,2"]) == 2
    assert "did you mean recipe.effective_batch?" in capsys.readouterr().err


def test_values_end_at_commas_outside_quotes_and_brackets() -> None:
    found = combinations(['a.b="x, y",z', "c=[100, 500],[900]", "d=1e-4"])
    assert found == [
        {"a.b": text, "c": steps, "d": "1e-4"} for text in ('"x, y"', "z") for steps in ("[100, 500]", "[900]")
    ]


@pytest.mark.parametrize(
    "values", [["recipe.rank"], ["recipe.rank=8"], ["recipe.rank=8,8"], ["recipe.rank=4,8", "recipe.rank=16"],
               ["name=a,b"], ["=1,2"], [f"recipe.rank={','.join(map(str, range(1, 102)))}"], ["recipe.rank=,"]],
)  # fmt: skip
def test_settings_that_make_no_sweep_are_refused(values: list[str]) -> None:
    with pytest.raises(JobError, match="Could not start a sweep"):
        combinations(values)


def test_one_invalid_combination_keeps_all_out_of_the_queue(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", str(job), "--set", "recipe.rank=8,-1"]) == 2
    assert "recipe.rank=-1" in capsys.readouterr().err
    assert main(["sweep", str(job)]) == 2
    assert Queue().entries() == []
    assert main(["sweep"]) == 0
    assert "no sweeps" in capsys.readouterr().err


def test_settings_too_long_for_a_file_name_give_numbered_jobs(job: Path) -> None:
    prompts = ",".join(f'"{letter * 120}"' for letter in "ab")
    assert main(["sweep", str(job), "--set", f"report.previews.prompts.0.prompt={prompts}"]) == 0
    assert [entry.name for entry in Queue().entries()] == ["style-1", "style-2"]


def test_results_are_read_from_the_runs_even_without_queue_entries(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["sweep", str(job), "--set", "recipe.rank=8,16,32"])
    queue, runs = Queue(), tmp_path / "style" / "runs"
    first, second, third = queue.entries()
    finish(RunDirectory.create(runs, first.name), {5: 0.3, 10: 0.1, 20: 0.2}, held_out=True, reserved=3 << 30)
    finish(RunDirectory.create(runs, second.name), {10: 0.4}, held_out=False, reserved=None)
    for entry in (first, second):
        queue.remove(entry.id)
    capsys.readouterr()
    assert main(["sweep", "style", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    keys = ("state", "step", "validation_loss", "loss_on_training_images", "best_step", "peak_memory")
    assert [[result[key] for key in keys] for result in shown["results"]] == [
        ["done", 20, 0.1, None, 10, 3 << 30], ["done", 10, None, 0.4, 10, 7 << 20], ["waiting", 0, *[None] * 4],
    ]  # fmt: skip
    assert not Path(shown["grid"]).exists()
    queue.record_outcome(third.id, "failed", "The base is gone.")
    assert main(["sweep", "style"]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0].split()[:3] == ["RANK", "STATE", "STEP"]
    assert "0.1000 (step 10)" in lines[1]
    assert "3.0 GiB" in lines[1]
    assert lines[3].endswith("The base is gone.")
    assert "memorizes" in printed.err
    with Image.open(shown["grid"]) as grid, Image.open(runs / first.name / "samples/step-00000020-1.png") as preview:
        # The center of the second preview of the first run, wherever it was scaled to.
        assert grid.getpixel((240 + 256 + 12 + 102, 12 + 128)) == preview.getpixel((128, 160))
        assert grid.size == (240 + 2 * 268, 12 + 3 * 268)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("recipe.resolution=64,128", "losses of different jobs are not comparable: recipe.resolution"),
        ("recipe.captions.prefix=a,b", "losses of different jobs are not comparable: recipe.captions.prefix"),
        ("recipe.clip_skip=1,2", "losses of different jobs are not comparable: recipe.clip_skip"),
        ("recipe.objective.loss=mse,l1", "training losses are not comparable: recipe.objective.loss"),
        ("recipe.captions.shuffle=true,false", ""),
        ("recipe.rank=2,4", ""),
    ],
)
def test_a_sweep_over_what_is_measured_says_so(
    setting: str, said: str, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["sweep", str(job), "--set", setting])
    capsys.readouterr()
    assert main(["sweep", "style"]) == 0
    printed = capsys.readouterr().err
    assert said in printed if said else "comparable" not in printed


def test_an_unknown_or_damaged_sweep_is_an_error_with_a_remedy(
    job: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["sweep", "none"]) == 2
    main(["sweep", str(job), "--set", "recipe.rank=8,16"])
    (places.home() / "sweeps" / "style.json").write_text("{}", encoding="utf-8")
    assert main(["sweep", "style"]) == 2
    assert "Could not read the sweep" in capsys.readouterr().err
