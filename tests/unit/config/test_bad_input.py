"""What is wrong with a job file is said in a sentence that names the key, with a remedy, and all at once."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import toml_file
from trainer.config.job import Job
from trainer.config.load import load_job, parse_job
from trainer.config.schema import fields
from trainer.config.toml_file import toml_value
from trainer.errors import EXIT_BAD_INPUT, JobError

GOOD = """
schema = 1
name = "my-style"
[base]
model = "model.safetensors"
[[dataset.folders]]
path = "pictures"
"""


def complaint(path: Path, *overrides: str) -> JobError:
    """The error that loading ends in, after checking what every such error must have."""
    with pytest.raises(JobError) as caught:
        load_job(path, overrides)
    error = caught.value
    assert error.exit_code == EXIT_BAD_INPUT
    assert error.remedy.endswith((".", "job.toml"))
    for jargon in ("pydantic", "validation error", "Input should", "type=", "Traceback", "extra_forbidden", "tomllib"):
        assert jargon not in error.sentence + error.remedy
    return error


def problem(tmp_path: Path, text: str, *overrides: str) -> str:
    (tmp_path / "job.toml").write_text(text, encoding="utf-8")
    error = complaint(tmp_path / "job.toml", *overrides)
    assert len(error.problems) == 1, error.problems
    assert error.problems[0] in error.sentence
    assert "job.toml" in error.sentence
    return error.problems[0]


KEYS = {
    "unknown key": ("[recipe]\nrnak = 8", "recipe.rnak: unknown key (did you mean rank?)"),
    "unknown table": ("[recepe]\nrank = 8", "recepe: unknown key (did you mean recipe?)"),
    "key of another table": ("[recipe.captions]\nrank = 8", "(did you mean recipe.rank?)"),
    "key like no other": (
        "[recipe.schedule]\nxyzzy = 1",
        "valid keys of [recipe.schedule] are kind, warmup, end, cycles, power",
    ),
    "number in quotes": ('[recipe]\nrank = "8"', "recipe.rank: must be a whole number from 1 to 1024, not the text"),
    "hint to the quotes": ('[recipe]\nlearning_rate = "1e-4"', "(write 1e-4 without quotes)"),
    "fraction of a rank": ("[recipe]\nrank = 8.5", "recipe.rank: must be a whole number from 1 to 1024, not 8.5"),
    "whole number as 8.0": ("[recipe]\nrank = 8.0", "(write 8)"),
    "number too small": ("[recipe]\nrank = 0", "recipe.rank: must be a whole number from 1 to 1024, not 0"),
    "captions from nowhere": (
        '[dataset]\ncaption_sources = ["txt"]',
        'dataset.caption_sources.0: must be a list, each item text such as ".txt" or "metadata" or "filename"',
    ),
    "half a step": (
        "[recipe.captions]\ntoken_warmup_step = 1.5",
        "recipe.captions.token_warmup_step: is 1.5: use a whole number of steps, or a share of the run below 1",
    ),
    "number too large": ("[recipe.captions]\ndropout = 1.5", "recipe.captions.dropout: must be a number from 0 to 1"),
    "bound excluded": ("[recipe]\nalpha = 0", "recipe.alpha: must be a number above 0 and up to 4096, not 0"),
    "infinite": ("[recipe]\nlearning_rate = inf", "recipe.learning_rate: must be a number from 0 to 100, not inf"),
    "not a number": ("[recipe]\nlearning_rate = nan", "recipe.learning_rate: must be a number from 0 to 100, not nan"),
    "not a multiple": (
        "[recipe]\nresolution = 500",
        "recipe.resolution: must be a whole number from 64 to 4096, a mul",
    ),
    "yes for true": ('[recipe.images]\nflip = "yes"', 'must be true or false, not the text "yes" (write true or'),
    "true for a number": ("[recipe]\nrank = true", "recipe.rank: must be a whole number from 1 to 1024, not true"),
    "misspelt choice": ('[recipe]\nlayers = "atention"', "(did you mean attention?)"),
    "unknown optimizer": (
        '[recipe.optimizer]\nname = "adam"',
        "recipe.optimizer.name: must be one of adamw, adamw8bit",
    ),
    "argument of another optimizer": (
        '[recipe.optimizer]\nname = "prodigy"\neps = 1e-8',
        "recipe.optimizer.eps: unknown key; valid keys of [recipe.optimizer] are name, beta1",
    ),
    "optimizer as text": ('[recipe]\noptimizer = "adamw"', "recipe.optimizer: must be a table"),
    "value for a table": ("[report]\npreviews = 5", "report.previews: must be a table, not 5"),
    "table for a value": ("[recipe.rank]\nunet = 5", "recipe.rank: must be a whole number from 1 to 1024, not a table"),
    "not a color": ('[dataset]\nbackground = "white"', 'dataset.background: must be text such as "#ffffff"'),
    "unknown device": ('[fit]\ndevice = "gpu"', 'fit.device: must be text such as "cpu"'),
    "unknown block": (
        '[fit]\ncheckpointing = ["middle"]',
        'fit.gradient_checkpointing: must be "none" or "full" or a list',
    ),
    "token chunks": ("[recipe]\ntoken_chunks = 77", "recipe.token_chunks: must be 75, 150 or 225, not 77"),
    "two lengths": ("[recipe]\nsteps = 9\nepochs = 2", "recipe.steps: is set, and so is epochs: set only one length"),
    "nothing trained": ("[recipe]\nlearning_rate = 0", "recipe.learning_rate: is 0 for the UNet and all text encoders"),
    "two weightings": (
        "[recipe.objective]\ndebiased = true\nmin_snr_gamma = 5",
        "recipe.objective.debiased_estimation: cannot be",
    ),
    "timesteps reversed": ("[recipe.objective]\ntimestep_min = 9\ntimestep_max = 2", "which is above timestep_max = 2"),
    "buckets reversed": ("[recipe.images]\nbucket_min = 1024\nbucket_max = 512", "above bucket_max = 512"),
    "warm-up of 1.5": (
        "[recipe.schedule]\nwarmup = 1.5",
        "recipe.schedule.warmup: is 1.5: use a whole number of steps",
    ),
    "adafactor with a schedule": (
        '[recipe]\nschedule.kind = "cosine"\noptimizer = {name = "adafactor", relative_step = true}',
        'recipe.schedule.kind: must be "constant": Adafactor with relative_step',
    ),
    "schedule-free with warm-up": (
        '[recipe]\nschedule.warmup = 10\noptimizer = {name = "schedulefree"}',
        "recipe.schedule.warmup: must be 0: Schedule-Free AdamW has its own warmup, optimizer.warmup_steps",
    ),
    "half a step of a text encoder": (
        "[recipe.text_encoder]\nlearning_rate = 1e-4\nstop_after = 1.5",
        "recipe.text_encoder.stop_after: is 1.5: use a whole number of steps, or a share of the run below 1",
    ),
    "nothing left to train": (
        "[recipe]\nlearning_rate = 0\ntext_encoder = {learning_rate = 1e-4, stop_after = 100}",
        "recipe.text_encoder.stop_after: leaves nothing to train after it, because the UNet is not trained",
    ),
    "two averages": (
        '[recipe]\nema_decay = 0.999\noptimizer = {name = "schedulefree"}',
        "recipe.ema_decay: cannot be used: Schedule-Free AdamW averages the weights itself",
    ),
    "adafactor warm-up alone": (
        '[recipe.optimizer]\nname = "adafactor"\nwarmup_init = true',
        "recipe.optimizer.warmup_init: requires relative_step = true",
    ),
    "two saving rhythms": (
        "[report.saving]\nevery_steps = 5\nevery_epochs = 1",
        "report.saving.every_steps: is set, and",
    ),
    "two preview rhythms": (
        "[report.previews]\nevery = 5\nevery_epochs = 1",
        "report.previews.every: is set, and so is every_epochs",
    ),
    "noise strength": ("[report.validation]\ntimesteps = [1, 1000]", "report.validation.timesteps.1: must be a whole"),
    "too large a share": (
        "[dataset]\nvalidation_share = 0.9",
        "dataset.validation_share: must be a number from 0 to 0.5",
    ),
    "folder twice": (
        '[[dataset.folders]]\npath = "./pictures/"',
        "dataset.folders.1.path: is the same folder as folders.0",
    ),
    "windows path": (
        '[output]\nruns = "D:\\new"',
        "output.runs: contains a line break or another control character; write Windows paths in",
    ),
}


@pytest.mark.parametrize(("text", "expected"), KEYS.values(), ids=KEYS.keys())
def test_bad_key_is_named_with_its_reason(tmp_path: Path, text: str, expected: str) -> None:
    body = GOOD.replace("[[dataset.folders]]", "[dataset]\nmasks='none'\n[[dataset.folders]]")
    if text.startswith("[dataset]"):
        body = GOOD.replace("[[dataset.folders]]", text + "\n[[dataset.folders]]")
        text = ""
    assert expected in problem(tmp_path, f"{body}\n{text}\n")


REWRITTEN = {
    "no name": ('name = "my-style"', "", "name: is missing: the name of the LoRA"),
    "empty name": ('"my-style"', '""', "name: must be text"),
    "name of dots": ('"my-style"', '".."', "name: must be text"),
    "no base": ('[base]\nmodel = "model.safetensors"', "", "base: is missing"),
    "no model": ('model = "model.safetensors"', "", "base.model: is missing: a .safetensors checkpoint"),
    "empty model": ('"model.safetensors"', '""', "base.model: must be text, not an empty text"),
    "http link": (
        '"model.safetensors"',
        '"http://x.org/m.safetensors"',
        "base.model: is a link that does not start with",
    ),
    "epsilon with zero SNR": (
        'model = "model.safetensors"',
        'model = "m.safetensors"\nprediction = "epsilon"\nzero_terminal_snr = true',
        'base.zero_terminal_snr: cannot be true with prediction = "epsilon"',
    ),
    "no pictures": ('[[dataset.folders]]\npath = "pictures"', "", "dataset: is missing"),
    "no folders": (
        '[[dataset.folders]]\npath = "pictures"',
        "[dataset]\nfolders = []",
        "dataset.folders: must be a list",
    ),
    "folder as text": (
        '[[dataset.folders]]\npath = "pictures"',
        '[dataset]\nfolders = "pictures"',
        "dataset.folders: must",
    ),
    "nothing to learn from": (
        'path = "pictures"',
        'path = "p"\nkind = "validation"',
        "dataset.folders: has no folder of",
    ),
    "bad item of folders": (
        'path = "pictures"',
        'paht = "pictures"\npath = "p"',
        "dataset.folders.0.paht: unknown key",
    ),
    "folder of a number": (
        '[[dataset.folders]]\npath = "pictures"',
        "[dataset]\nfolders = [3]",
        "dataset.folders.0: must be",
    ),
    "key with a dot": ("schema = 1", '"recipe.rank" = 4', '"recipe.rank": unknown key'),
    "key of nothing": ("schema = 1", '"" = 4', '"": unknown key'),
    "schema in words": ("schema = 1", 'schema = "one"', "schema: must be a whole number"),
}


@pytest.mark.parametrize(("old", "new", "expected"), REWRITTEN.values(), ids=REWRITTEN.keys())
def test_bad_essentials_are_named(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert old in GOOD
    assert expected in problem(tmp_path, GOOD.replace(old, new))


TOML = {
    "key twice": ("name = 'a'\nname = 'b'", "line 2, name = 'b': the key on this line is in the file twice"),
    "table twice": ("[base]\n[base]", "line 2, [base]: this table is in the file twice"),
    "key twice in braces": (
        "a = {b = 1, b = 2}",
        "line 1, a = {b = 1, b = 2}: the key on this line is in the file twice",
    ),
    "path in double quotes": (
        'a = "C:\\Users"',
        'line 1, a = "C:\\Users": a \\ in double quotes is a special character',
    ),
    "unquoted text": (
        "\n\nname = style",
        'line 3, name = style: this is not a valid value; text needs quotes ("like this")',
    ),
    "True": ("flip = True", "true and false are lowercase"),
    "no equals sign": ("name my", "line 1, name my: a line must have the form key = value"),
    "two values": ("name = 'a' b", "there is something after the value"),
    "open text": ("name = 'a\nb = 'c'", "line 1, name = 'a: a closing quote is missing"),
    "open last text": ('name = "a', 'line 1, name = "a: a closing quote is missing'),
    "open long text": ("name = '''a\nb", "a closing quote is missing, at the end of the file"),
    "odd line ends": ("a = '\u2028'\nb = c", "line 2, b = c: this is not a valid value"),
    "open list": ("a = [1,\n2", "a closing ] of a list is missing, at the end of the file"),
    "open table name": ("[base\n", "line 1, [base: the closing ] of a table name is missing"),
    "not TOML at all": (
        '{"name": "json"}',
        'line 1, {"name": "json"}: a line must have the form key = value or [table]',
    ),
}


@pytest.mark.parametrize(("text", "expected"), TOML.values(), ids=TOML.keys())
def test_broken_toml_names_line_and_mistake(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "job.toml").write_text(text, encoding="utf-8")
    error = complaint(tmp_path / "job.toml")
    assert error.code == "job.toml"
    assert expected in error.sentence
    assert "line" in error.remedy or "end of the file" in error.remedy


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a = " + "9" * 5000, "a number has thousands of digits"), ("a = " + "[" * 100_000, "nested")],
    ids=["endless number", "endless nesting"],
)
def test_what_has_no_end_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "job.toml").write_text(text, encoding="utf-8")
    assert expected in complaint(tmp_path / "job.toml").sentence


FILES = {
    "latin-1": (
        GOOD.replace("my-style", "gemälde").encode("latin-1"),
        "job.encoding",
        "line 3 contains an invalid byte",
    ),
    "UTF-16": (GOOD.encode("utf-16"), "job.encoding", "saved as UTF-16"),
    "UTF-32": (GOOD.encode("utf-32"), "job.encoding", "saved as UTF-32"),
    "UTF-32, the other order": (b"\0\0\xfe\xff" + GOOD.encode("utf-32-be"), "job.encoding", "saved as UTF-32"),
    "over a mebibyte": (b"#" * (1024 * 1024 + 1), "job.large", "larger than 1 MiB"),
    "newer schema": (b"schema = 99\nanything = 1", "job.newer", "by a newer Impasto (schema 99)"),
    "schema that never was": (b"schema = -3", "job.schema", "Schema -3 does not exist"),
}


@pytest.mark.parametrize(("data", "code", "expected"), FILES.values(), ids=FILES.keys())
def test_unfit_file_is_refused(tmp_path: Path, data: bytes, code: str, expected: str) -> None:
    (tmp_path / "job.toml").write_bytes(data)
    error = complaint(tmp_path / "job.toml")
    assert error.code == code
    assert expected in error.sentence


def test_missing_file_and_folder_say_what_to_name(tmp_path: Path) -> None:
    assert "file not found" in complaint(tmp_path / "nothing.toml").sentence
    (tmp_path / "job.toml").write_text(GOOD, encoding="utf-8")
    error = complaint(tmp_path)
    assert "it is a folder" in error.sentence
    assert str(tmp_path / "job.toml") in error.remedy


@pytest.mark.parametrize("name", ["a\0b.toml", "a" * 5000 + ".toml", "a\ud800.toml"])
def test_a_path_that_can_be_none_is_refused(tmp_path: Path, name: str) -> None:
    error = complaint(tmp_path / name)
    assert error.code == "job.unreadable"
    assert len(error.sentence + error.remedy) < 1000


def test_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The system's refusal is made here, since an administrator, and so many a test machine, is never refused.
    def refuse(path: Path, kind: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(toml_file, "open_file", refuse)
    error = complaint(tmp_path / "job.toml")
    assert error.code == "job.unreadable"
    assert "you don't have permission to read it" in error.sentence


OVERRIDES = {
    "no value": ("recipe.rank", "--set recipe.rank: must have the form key=value"),
    "empty step": ("recipe..rank=3", "--set recipe..rank=3: must have the form key=value"),
    "unknown key": ("recipe.rnak=3", "recipe.rnak: unknown key (did you mean rank?)"),
    "bad value": ("recipe.rank=many", 'recipe.rank: must be a whole number from 1 to 1024, not the text "many"'),
    "no such folder": (
        "dataset.folders.1.repeats=3",
        "dataset.folders.1.repeats: no such item; dataset.folders has 1",
    ),
    "not a place": ("dataset.folders.x.repeats=3", "dataset.folders.x.repeats: no such item"),
    "below a value": ("name.first=3", "name.first: name is a single value"),
    "newer schema": ("schema=4", "schema: must be a whole number from 1 to 3, not 4"),
    "no text": ("name=\udcff", 'name: must be text such as "my-style", not the text "\\udcff"'),
    "endless number": ("recipe.rank=" + "9" * 5000, "recipe.rank: must be a whole number"),
    "endless list": ("recipe.rank=" + "[" * 5000, "recipe.rank: must be a whole number"),
    "smuggled key": ("recipe.rank=1\nseed=2", "recipe.rank: must be a whole number"),
}


@pytest.mark.parametrize(("override", "expected"), OVERRIDES.values(), ids=OVERRIDES.keys())
def test_bad_override_is_named(tmp_path: Path, override: str, expected: str) -> None:
    assert expected in problem(tmp_path, GOOD, override)


def test_all_problems_of_a_file_come_at_once(tmp_path: Path) -> None:
    text = (
        GOOD
        + "[recipe]\nrnak = 1\nalpha = 0\n[recipe.objective]\ntimestep_min=5\ntimestep_max=1\n[fit]\ndtype = 'fp8'\n"
    )
    (tmp_path / "job.toml").write_text(text, encoding="utf-8")
    error = complaint(tmp_path / "job.toml", "dataset.folders.7.repeats=1", "recipe.seed=-1")
    named = {line.partition(":")[0] for line in error.problems}
    assert named == {
        "recipe.rnak",
        "recipe.alpha",
        "recipe.objective.timestep_min",
        "fit.dtype",
        "dataset.folders.7.repeats",
        "recipe.seed",
    }
    assert "job.toml has 6 problems:" in error.sentence
    assert all(line in error.sentence for line in error.problems)


ANY_KEY = st.sampled_from([found.key.replace("*", "0").partition("[")[0] for found in fields(Job)])
ANY_VALUE = st.recursive(
    st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=150)
@given(st.lists(st.tuples(ANY_KEY, ANY_VALUE), min_size=1, max_size=4))
def test_no_value_of_any_key_ends_in_anything_but_a_job_or_its_problems(pairs: list[tuple[str, object]]) -> None:
    text = GOOD + "[[report.previews.prompts]]\nprompt = 'a'\n"
    keys = [f"{key}={toml_value(value)}" for key, value in pairs]
    try:
        assert isinstance(parse_job(text, "job.toml", Path("jobs"), keys), Job)
    except JobError as error:
        assert error.problems
        for line in error.problems:
            assert line.partition(": ")[0] and line.partition(": ")[2], line
            assert "pydantic" not in line and "Input should" not in line
