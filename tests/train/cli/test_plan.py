"""The command `plan` as people and programs use it: the table, the explanation, JSON, and the resident server."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import photographs, write_job
from tests.support.tiny import tiny_base
from trainer import cli
from trainer.cli import planning
from trainer.cli.plan_text import MOST_OPTIMIZERS

ONE_SIZE = ("recipe.images.buckets=false", "recipe.layers=attention")
# So much is trained at once that training decides the peak, not the segments in which the base is loaded.
TRAINING_DECIDES = (
    *ONE_SIZE,
    "recipe.resolution=256",
    "recipe.effective_batch=16",
    "fit.micro_batch=16",
    "report.previews.prompts=[]",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans ü")


@pytest.fixture(scope="module")
def job(folder: Path) -> Path:
    """Return a job with a base of few layers, which is traced quickly, and sixteen samples per epoch."""
    base = tiny_base("sd15", folder / "base", depth=1)
    path = write_job(folder / "job", base, photographs(folder / "pictures", count=2))
    text = path.read_text(encoding="utf-8").replace("trigger =", "repeats = 8\ntrigger =")
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def shared_home(folder: Path, per_user_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test has traced the others know. However busy the machine is, every fit is looked at."""
    monkeypatch.setenv("IMPASTO_HOME", str(folder / "home"))
    for name in ("PATIENCE", "ALTERNATIVES_PATIENCE"):
        monkeypatch.setattr(planning, name, 600.0)


def words_of(job: Path, *more: str) -> list[str]:
    return ["plan", str(job), "--gpu", "8GB", *more, *(word for key in ONE_SIZE for word in ("--set", key))]


def test_the_table_is_short_and_says_what_json_says(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    in_bf16 = ("--set", "fit.vae_dtype=bf16")
    assert cli.main(words_of(job, "--explain", *in_bf16)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 60 and max(map(len, lines)) <= 100, max(lines, key=len)
    assert sum(line.startswith("If the VAE produces non-finite values in bf16") for line in lines) == 1
    assert cli.main(words_of(job, "--json", *in_bf16)) == 0
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert not told.err
    pick = next(line for line in lines if line.startswith("Pick"))
    taken, budget = found["pick"]["forecast"]["reserved"], found["pick"]["forecast"]["budget"]
    assert f"{min(taken, budget) / 2**20:.1f} MiB of {budget / 2**30:.1f} GiB" in pick
    assert sum(line.endswith("peak") for line in lines) == 1
    assert any(line.startswith("TO USE LESS") for line in lines)
    table = lines[next(place for place, line in enumerate(lines) if line.startswith("OPTIMIZER")) + 1 :]
    own, *others = found["optimizers"]
    small = sorted(others, key=lambda row: row["state"])[: MOST_OPTIMIZERS - 1]
    small = [row["name"] for row in others if row in small]
    assert [line.split()[0] for line in table[:MOST_OPTIMIZERS]] == [own["name"], *small]
    assert f"{len(others) - len(small)} more optimizers keep at least as much state; --json lists them." in lines
    assert table[0].startswith("adamw (this job)") and "~" not in table[0] and "~" in table[2]
    assert found["pick"]["fit"]["micro_batch"] == 2  # as the job states
    assert found["estimate"] is None  # nothing similar is known
    peaks = {peak["peak"]: peak for peak in found["known_peaks"]}
    assert "".join(peaks) == "ABCDEFGHI" and peaks["A"]["reason"] == "not_quantized"
    training = next(phase for phase in found["pick"]["forecast"]["phases"] if phase["phase"] == "train")
    workspaces = 20 * 2**20
    assert training["allocated"] - workspaces < peaks["E"]["bytes"] <= training["allocated"]


@pytest.mark.slow
def test_json_has_the_estimate_that_preceded_a_plan_of_new_settings(capsys: pytest.CaptureFixture[str]) -> None:
    one_fit = ("fit.gradient_checkpointing=none", "fit.micro_batch=1", "fit.quantize=none", "fit.stream=none")
    keys = [word for key in ("recipe.dropout=0.1", *one_fit) for word in ("--set", key)]
    assert cli.main(["plan", "--family", "sd15", "--recipe", "style", "--gpu", "12GB", "--json", *keys]) == 0
    found = json.loads(capsys.readouterr().out)
    estimate, forecast = found["estimate"], found["pick"]["forecast"]
    assert estimate["fits"] is True and estimate["budget"] == forecast["budget"]
    assert estimate["reserved"] == pytest.approx(forecast["reserved"], rel=0.2)


def test_where_encoding_alone_takes_as_much_no_plan_is_called_smaller(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The allocator's segments for encoding are larger than everything that trains so small a base."""
    assert cli.main(words_of(job, "--json", "--set", "fit.compile=true")) == 0
    found = json.loads(capsys.readouterr().out)
    encoding = next(phase for phase in found["pick"]["forecast"]["phases"] if phase["phase"] == "cache_pictures")
    assert found["smaller"] is None and encoding["reserved"] > 0.85 * found["pick"]["forecast"]["reserved"]
    values = {"phase": "cache_pictures", "bytes": encoding["reserved"]}
    assert {"code": "smaller.phase", "values": values} in found["remarks"]
    assert {"code": "fit.experiment", "values": {"key": "fit.compile"}} in found["remarks"]
    reason = f'needs much less memory: "Encode images" takes {encoding["reserved"] / 2**20:.1f} MiB'
    assert cli.main(words_of(job)) == 0
    told = capsys.readouterr().out
    assert reason in told and "fit.compile" not in told


def test_what_time_was_too_short_for_is_said(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("PATIENCE", "ALTERNATIVES_PATIENCE"):
        monkeypatch.setattr(planning, name, -1.0)
    assert cli.main(words_of(job, "--json", "--set", "recipe.rank=3")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["left_out"] == ["fits", "alternatives"]
    assert found["remarks"][0] == {"code": "search.incomplete", "values": {}}
    assert cli.main(words_of(job, "--explain", "--set", "recipe.rank=3")) == 0
    assert "Time ran out before changes to fit." in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["plan"], "give either a JOB or a --family"),
        (["plan", "--family", "sd15", "--gpu", "8GB", "--set", "recipe.rank=0"], "recipe.rank: must be a whole number"),
        (["plan", "--family", "sd15", "--gpu", "RTX 9999"], 'the GPU "RTX 9999"'),
        (["plan", "--family", "sd15", "--gpu", "7GB"], "Could not plan for a GPU with 7 GB"),
        (["plan", "--family", "sd15", "--gpu", "8GB", "--recipe", "nothing"], "nothing"),
        (["plan", "nowhere.toml", "--gpu", "8GB"], "nowhere.toml"),
    ],
)
def test_a_question_that_cannot_be_answered_is_a_sentence(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    told = capsys.readouterr()
    assert not told.out and part in told.err and "What to do: " in told.err


# However busy the machine is, every fit is looked at, and a second process has time to end in order.
PATIENT = """
import sys
from trainer import cli
from trainer.cli import planning
from trainer.memory.trace import prefetch as aside
planning.PATIENCE = planning.ALTERNATIVES_PATIENCE = aside.PATIENCE = 600.0
sys.exit(cli.main(["plan", "--serve"]))
"""


def serving() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-X", "utf8", "-c", PATIENT],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8",
    )  # fmt: skip


def test_without_a_gpu_a_job_is_forecast_for_the_cpu(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So it is for a job that names the CPU, whatever GPU is here; another GPU is planned for as before."""
    found = {}
    for name, more in (("here", ()), ("by the job", ("--set", "fit.device=cpu")), ("GPU", ("--gpu", "8GB"))):
        words = ["plan", str(job), "--json", *more, *(word for key in ONE_SIZE for word in ("--set", key))]
        assert cli.main(words) == 0
        found[name] = json.loads(capsys.readouterr().out)
    assert [answer["gpu"]["name"] for answer in found.values()] == ["cpu", "cpu", "RTX 4060 8GB"]
    pick = found["here"]["pick"]
    assert (pick["fit"]["device"], pick["fit"]["dtype"], pick["forecast"]["exact"]) == ("cpu", "fp32", True)
    seconds = {phase["phase"]: phase["seconds"] for phase in pick["forecast"]["phases"]}
    assert min(seconds[name] for name in ("cache_pictures", "cache_texts", "train", "validate", "preview")) > 0
    assert sum(seconds.values()) == pytest.approx(pick["forecast"]["seconds"])
    assert cli.main(["plan", str(job), "--explain"]) == 0
    told = capsys.readouterr().out
    assert "This computer's CPU" in told and "0 B" not in told
    assert sum(line.startswith(("Train ", "Validate ", "Render previews ")) for line in told.splitlines()) == 3


def test_a_newer_question_ends_the_one_before() -> None:
    """The tapes of both ship, so the first would be answered: it is given up between two replays."""
    questions = [{"id": number, "family": "sdxl", "recipe": "style", "gpu": f"{8 + 4 * number}GB"} for number in (0, 1)]
    with serving() as server:
        told, _ = server.communicate("".join(f"{json.dumps(question)}\n" for question in questions))
    answers = [json.loads(line) for line in told.splitlines()]
    states = [(answer["id"], answer["state"]) for answer in answers]
    assert states in (
        [(0, "cancelled"), (1, "pick"), (1, "done")],
        [(0, "pick"), (0, "cancelled"), (1, "pick"), (1, "done")],
    )
    assert answers[-1]["plan"]["gpu"]["name"] == "RTX 3060 12GB"


def test_a_planner_that_nobody_asks_gets_ready_to_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """As what that needs takes seconds to import: once it has been idle, in a thread that holds up no answer."""
    ready = threading.Event()

    def lines() -> Iterator[str]:
        assert ready.wait(60)
        yield from ()

    monkeypatch.setattr(planning, "IDLE", 0.01)
    monkeypatch.setattr(planning, "prepare", ready.set)
    monkeypatch.setattr(sys, "stdin", lines())
    assert planning.serve() == 0


def test_the_server_answers_each_line_by_its_id_and_keeps_stderr_clean(job: Path) -> None:
    wrong: list[tuple[Any, str]] = [
        (None, "rubbish"),
        (None, "[1, 2]"),
        (None, '{"job": "x"}'),
        (3, '{"id": 3}'),
        ("vier", '{"id": "vier", "family": 7}'),
        (5, '{"id": 5, "family": "flux", "gpu": "8GB"}'),
        (6, '{"id": 6, "family": "sd15", "gpu": "RTX 9999"}'),
        (7, json.dumps({"id": 7, "job": str(job), "set": "recipe.rank=4", "gpu": "8GB"})),
        (8, json.dumps({"id": 8, "job": str(job.parent), "gpu": "8GB"})),
        (9, json.dumps({"id": 9, "job": str(job), "set": ["recipe.rnak=4"], "gpu": "8GB"})),
    ]
    early: list[dict[str, Any]] = []
    with serving() as server:
        assert server.stdin and server.stdout and server.stderr

        def ask(line: str) -> dict[str, Any]:
            server.stdin.write(line + "\n")  # type: ignore[union-attr]
            server.stdin.flush()  # type: ignore[union-attr]
            while (answer := json.loads(server.stdout.readline()))["state"] in ("reading", "tracing", "pick"):  # type: ignore[union-attr]
                assert answer["id"] == "größe"
                if answer["state"] != "reading":  # comes where no earlier test has looked at the pictures
                    early.append(answer)
            found: dict[str, Any] = answer
            return found

        for identity, line in wrong:
            answer = ask(line)
            assert (answer["id"], answer["state"]) == (identity, "error"), line
            assert answer["sentence"] and answer["remedy"]
        request = {"id": "größe", "job": str(job), "gpu": "8GB", "set": list(TRAINING_DECIDES)}
        first = ask(json.dumps(request))
        assert (first["id"], first["state"]) == ("größe", "done")
        assert early[-1]["state"] == "pick" and early[-1]["plan"]["pick"] == first["plan"]["pick"]
        assert early[-1]["plan"]["smaller"] is None and first["plan"]["smaller"] is not None
        taken = (first["plan"][plan]["forecast"]["reserved"] for plan in ("smaller", "pick"))
        assert next(taken) <= 0.85 * next(taken)
        assert ask(json.dumps(request))["plan"]["pick"] == first["plan"]["pick"]
        # Of a new setting the last plan is told first, before a search that needs more traces has ended.
        early.clear()
        second = ask(json.dumps({**request, "set": [*TRAINING_DECIDES, "recipe.dropout=0.1"]}))
        assert [answer["state"] for answer in early] == ["tracing", "pick", "pick"]
        tracing, likely, picked = early
        assert tracing["stale"]["pick"] == first["plan"]["pick"]
        forecast = first["plan"]["pick"]["forecast"]  # the same adapter, and its traces are known
        estimate = {"reserved": forecast["reserved"], "seconds": forecast["seconds"], "fits": True}
        assert tracing["estimate"] == {**estimate, "budget": forecast["budget"]}
        assert (likely["plan"]["left_out"], likely["plan"]["pick"]["fit"]) == (["fits"], first["plan"]["pick"]["fit"])
        codes = {remark["code"] for remark in likely["plan"]["remarks"]}
        assert not codes & {"search.incomplete", "alternatives.incomplete"}
        assert picked["plan"]["pick"] == second["plan"]["pick"]
        server.stdin.close()  # the end of the input ends it
        assert server.stdout.read() == "" and server.stderr.read() == ""
    assert server.returncode == 0
