"""The commands that look at files: check, inspect, new."""

import json
from pathlib import Path

import pytest

from tests.support.images import photograph
from tests.support.jobs import photographs
from trainer import cli, gpu
from trainer.cli import jobs
from trainer.config.load import load_job
from trainer.protocol.files import safe_name

GIB = 1 << 30
CARD = gpu.Gpu(0, "GPU-0", "NVIDIA GeForce RTX 4090", 24 * GIB, 23 * GIB, "581.15", (13, 1), (8, 9), ())


@pytest.fixture
def pictures(tmp_path):
    return photographs(tmp_path / "pictures ü", count=3)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu, "list_gpus", list)
    return tmp_path


def test_a_dataset_is_described_with_its_findings_and_captions(pictures, capsys):
    assert cli.main(["check", str(pictures), "--resolution", "64", "--show-captions"]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("3 images for training\n")
    assert "astronaut.png: a portrait of an astronaut, flag" in told.out
    assert "Check the images" in told.err  # progress is not the result


def test_faulty_pictures_are_named_with_the_remedy_and_end_in_code_2(pictures, capsys):
    (pictures / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nxx")
    assert cli.main(["check", str(pictures), "--resolution", "64"]) == 2
    told = capsys.readouterr().out
    assert "\nError: " in told
    assert "\n  broken.png\n" in told
    assert "What to do:" in told
    assert "3 images for training" in told


def test_long_lists_of_files_are_cut_unless_asked_for(tmp_path, capsys):
    folder = photographs(tmp_path / "many", count=1)
    data = (folder / "astronaut.png").read_bytes()
    for number in range(14):  # the same picture, again and again, without captions
        (folder / f"{number:02d}.png").write_bytes(data)
    cli.main(["check", str(folder), "--resolution", "64"])
    short = capsys.readouterr().out
    assert "--all lists them" in short
    cli.main(["check", str(folder), "--resolution", "64", "--all"])
    full = capsys.readouterr().out
    assert "--all lists them" not in full
    assert full.count("13.png") > short.count("13.png")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["missing"], "What to do:"),
        (["note.txt"], "What to do:"),
        (["pictures ü", "--resolution", "1001"], "resolution: must be a whole number"),
    ],
    ids=["a missing folder", "a text file", "a resolution that is no multiple of 8"],
)
@pytest.mark.usefixtures("pictures")
def test_what_cannot_be_checked_is_an_error_of_the_user(here, capsys, words, said):
    (here / "note.txt").write_text("x", encoding="utf-8")
    assert cli.main(["check", *words]) == 2
    assert said in capsys.readouterr().err


def test_kohyas_dataset_files_are_read_and_what_they_ask_for_is_told(pictures, tmp_path, capsys):
    file = tmp_path / "dataset.toml"
    file.write_text(
        f"[general]\nshuffle_caption = true\n[[datasets]]\nresolution = 64\n"
        f"[[datasets.subsets]]\nimage_dir = '{pictures}'\nnum_repeats = 5\n",
        encoding="utf-8",
    )
    assert cli.main(["check", str(file)]) == 0
    told = capsys.readouterr().out
    assert "recipe.captions.shuffle = true" in told
    assert "15 samples per epoch" in told


def test_new_writes_a_job_that_loads_and_counts_the_pictures(here, pictures, capsys):
    assert cli.main(["new", "--base", "owner/name", "--images", str(pictures), "Größe: 1", "--trigger", "sks"]) == 0
    written = here / safe_name("Größe: 1") / "job.toml"
    job = load_job(written)
    assert job.name == "Größe: 1"
    assert Path(job.dataset.folders[0].path) == pictures
    assert job.dataset.folders[0].trigger == "sks"
    assert str(written.relative_to(here)) in capsys.readouterr().out


def test_new_fits_the_job_to_the_largest_card(monkeypatch):
    small = gpu.Gpu(1, "GPU-1", "small", 4 * GIB, 4 * GIB, "581.15", (13, 1), (7, 5), ())
    monkeypatch.setattr(gpu, "list_gpus", lambda: [small, CARD])
    machine = jobs.machine_here()
    assert (machine.device, machine.gpu, machine.total_bytes, machine.bf16) == ("cuda:0", CARD.name, 24 * GIB, True)
    monkeypatch.setattr(gpu, "list_gpus", list)
    assert (jobs.machine_here().device, jobs.machine_here().total_bytes) == ("cpu", None)


def test_new_overwrites_nothing(here, pictures, capsys):
    words = ["new", "--base", "owner/name", "--images", str(pictures), "a"]
    assert cli.main(words) == 0
    (here / "a" / "job.toml").write_text("mine", encoding="utf-8")
    assert cli.main(words) == 2
    assert "already exists" in capsys.readouterr().err
    assert (here / "a" / "job.toml").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(("base", "pictures_given"), [("missing.safetensors", True), ("owner/name", False)])
def test_new_checks_what_it_is_given_before_it_writes(here, pictures, capsys, base, pictures_given):
    folder = pictures if pictures_given else here / "nowhere"
    assert cli.main(["new", "--base", base, "--images", str(folder), "a"]) == 2
    assert "What to do:" in capsys.readouterr().err
    assert not (here / "a").exists()


def safetensors(path, names, metadata):
    header = {name: {"dtype": "F16", "shape": shape, "data_offsets": [0, 0]} for name, shape in names.items()}
    size = 0
    for entry in header.values():
        length = 2 * entry["shape"][0] * (entry["shape"][1] if len(entry["shape"]) > 1 else 1)
        entry["data_offsets"] = [size, size + length]
        size += length
    text = json.dumps({"__metadata__": metadata, **header}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    return path


def test_inspect_tells_a_lora_with_its_metadata_made_safe_for_a_terminal(tmp_path, capsys):
    layer = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
    file = safetensors(
        tmp_path / "style.safetensors",
        {f"{layer}.lora_down.weight": [4, 320], f"{layer}.lora_up.weight": [320, 4]},
        {"modelspec.title": "nice\x1b[2Jname", "ss_comment": "x" * 5000},
    )
    assert cli.main(["inspect", str(file)]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"{file} is a LoRA for an unknown base with rank 4.\n")
    assert "rank 4" in told
    assert "modelspec.title: nice\\x1b[2Jname" in told
    assert "\x1b" not in told
    assert max(map(len, told.splitlines())) < 200


@pytest.mark.parametrize("data", [b"", b"<html>not found</html>", b"\xff" * 100])
def test_inspect_says_what_is_no_model(tmp_path, capsys, data):
    file = tmp_path / "model.safetensors"
    file.write_bytes(data)
    assert cli.main(["inspect", str(file)]) == 2
    assert "What to do:" in capsys.readouterr().err
    assert cli.main(["inspect", str(tmp_path / "missing.safetensors")]) == 2


LONG = "n" * 130


@pytest.mark.parametrize(
    ("name", "folder", "called"),
    [
        (".", ".", "here"),
        ("../x", "../x", "x"),
        ("..", "..", "above"),
        ("a/b", "a/b", "b"),
        (f"{LONG}/{LONG}", f"{LONG}/{LONG}", "n" * 95),
        ("con", "_con", "con"),
        ("あ" * 90, "あ" * 40, "あ" * 90),
    ],
)
def test_new_takes_a_name_or_a_folder(tmp_path, pictures, monkeypatch, name, folder, called):
    here = tmp_path / "above" / "here"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    assert cli.main(["new", "--base", "owner/name", "--images", str(pictures), name]) == 0
    job = load_job(here / folder / "job.toml")
    assert job.name == called
    assert Path(job.dataset.folders[0].path) == pictures


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "its name is empty"),
        ("   ", "its name is empty"),
        ("...", 'must be text such as "my-style"'),
        (LONG, "has 130 characters; at most 100"),
        ("a\nb", 'not the text "a\\nb"'),
    ],
)
def test_new_explains_names_that_cannot_be(here, pictures, capsys, name, why):
    assert cli.main(["new", "--base", "owner/name", "--images", str(pictures), name]) == 2
    assert why in capsys.readouterr().err
    assert not list(here.rglob("job.toml"))


LAYER = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"


def lora(path, **metadata):
    shapes = {f"{LAYER}.lora_down.weight": [4, 320], f"{LAYER}.lora_up.weight": [320, 4]}
    return safetensors(path, shapes, {key.replace("__", "."): value for key, value in metadata.items()})


def test_inspect_says_first_what_matters_and_which_base_our_own_file_is_for(tmp_path, capsys):
    file = lora(
        tmp_path / "style.safetensors",
        aaa="first of the alphabet",
        ss_base_model_version="sdxl_base_v1-0",
        ss_sd_model_name="pony.safetensors",
        ss_steps="500",
        ss_num_epochs="10",
        ss_resolution="(1024, 1024)",
        ss_clip_skip="None",
        modelspec__trigger_phrase="sks",
        modelspec__author="Zoë",
        modelspec__license="CC0",
    )
    assert cli.main(["inspect", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:7] == [
        f"{file} is a LoRA for SDXL with rank 4.",
        "  It adapts 1 layer of the UNet.",
        "  Trigger words: sks",
        "  Trained on: pony.safetensors",
        "  Training: 500 steps, 10 epochs",
        "  Resolution: (1024, 1024)",
        "  By: Zoë, CC0",
    ]
    assert lines[7:9] == ["  Metadata:", "    aaa: first of the alphabet"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--base", "none.safetensors"], "none.safetensors"),
        (["--base", "base.safetensors"], "is a web page"),
        (["--lora", "none.safetensors"], "none.safetensors"),
        (["--lora", "base.safetensors"], "is a web page"),
        (["--out", "base.safetensors/images"], "is a file"),
    ],
)
def test_render_checks_its_files_before_it_starts_an_engine(here, monkeypatch, capsys, words, said):
    monkeypatch.setattr("trainer.base.imports.quick_imports", lambda: pytest.fail("the engine is started"))
    (here / "base.safetensors").write_text("<html>log in</html>", encoding="utf-8")
    base = [] if "--base" in words else ["--base", "own/er"]
    assert cli.main(["render", "--prompt", "a cat", *base, *words]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert "Starting" not in shown.out + shown.err


def test_check_names_files_as_the_dataset_does_and_counts_where_all_are_meant(here, capsys):
    folder = here / "images" / "cats"
    folder.mkdir(parents=True)
    for number in range(12):
        photograph().rotate(number).save(folder / f"{number}.jpg")
    (folder / "3.txt").write_bytes(b"a\x00b")
    assert cli.main(["check", "images", "--recursive"]) == 0 + 2  # one caption cannot be read
    out = capsys.readouterr().out
    assert out.startswith("Assuming SDXL: training at 1024 × 1024. For SD 1.5, add --resolution 512.\n")
    assert "\nResolution: 1024 × 1024" in out
    _, _, finding = out.partition("Warning: 12 of 12 images without a caption")
    assert ".jpg" not in finding.partition("\n\n")[0], "a list of all images says nothing"
    assert str(here) not in out
    assert "cats/3.txt" in out.replace("\\", "/")
    assert cli.main(["check", "images", "--recursive", "--all", "--resolution", "512"]) == 2
    out = capsys.readouterr().out
    assert "Assumed" not in out
    assert "cats/11.jpg" in out.replace("\\", "/")


def test_two_folders_keep_their_names_in_what_check_says(here, capsys):
    for name in ("cats", "dogs"):
        (here / name).mkdir()
        photograph().resize((512, 512)).save(here / name / f"{name}.png")
        (here / name / f"{name}.txt").write_text(f"a {name}", encoding="utf-8")
    (here / "job.toml").write_text(
        'schema = 2\nname = "a"\n[base]\nmodel = "own/er"\nfamily = "sd15"\n'
        '[[dataset.folders]]\npath = "cats"\n[[dataset.folders]]\npath = "dogs"\n',
        encoding="utf-8",
    )
    (here / "cats" / "stray.txt").write_text("x", encoding="utf-8")
    assert cli.main(["check", "job.toml"]) == 0
    out = capsys.readouterr().out
    assert "\nResolution: 512 × 512" in out
    assert "Assumed" not in out
    assert "  cats/stray.txt\n" in out.replace("\\", "/")
