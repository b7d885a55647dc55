"""Jobs from files of sd-scripts: what they name on the disk, commands of each shell, and files that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.images import photograph
from tests.support.jobs import photographs
from trainer import cli, gpu
from trainer.config.load import load_job
from trainer.importers.reading import read_job
from trainer.importers.sd_scripts.files import prompt_of
from trainer.importers.sd_scripts.network import BLOCKS

NETWORK = 'network_module = "networks.lora"\nnetwork_dim = 4\nnetwork_alpha = 2\n'


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu, "list_gpus", list)
    return tmp_path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def values(path: Path, **options: Any) -> dict[str, Any]:
    return read_job(path, **options).found.values


def test_folders_with_repeats_are_listed(tmp_path: Path) -> None:
    for name in ("10_sks cat", "2_dog", "notes", "3_"):
        (tmp_path / "data ü" / name).mkdir(parents=True)
    (tmp_path / "reg" / "1_cat").mkdir(parents=True)
    config = write(tmp_path / "c.toml", NETWORK + 'train_data_dir = "data ü"\nreg_data_dir = "reg"\n')
    found = [
        (Path(each["path"]).name, each["kind"], each["repeats"], each["class_words"])
        for each in values(config)["dataset.folders"]
    ]
    assert found == [
        ("10_sks cat", "train", 10, "sks cat"),
        ("2_dog", "train", 2, "dog"),
        ("3_", "train", 3, None),
        ("1_cat", "regularization", 1, "cat"),
    ]


def test_captions_of_a_metadata_file_are_read(tmp_path: Path) -> None:
    pictures = photographs(tmp_path / "images", count=1)
    image = next(path for path in sorted(pictures.iterdir()) if path.suffix == ".png")
    write(tmp_path / "meta.json", json.dumps({image.stem: {"caption": "an astronaut", "tags": "flag, suit"}}))
    config = write(
        tmp_path / "c.toml",
        NETWORK + 'train_data_dir = "images"\nin_json = "meta.json"\ndataset_repeats = 3\n',
    )
    found = read_job(config)
    assert found.captions == {image: ("an astronaut, flag, suit",)}
    assert found.found.values["dataset.folders"] == [{"path": str(pictures), "repeats": 3}]


def test_a_dataset_file_takes_precedence(tmp_path: Path) -> None:
    photographs(tmp_path / "images", count=1)
    write(
        tmp_path / "data.toml",
        "[general]\nshuffle_caption = true\n[[datasets]]\nresolution = 640\n"
        '[[datasets.subsets]]\nimage_dir = "images"\nnum_repeats = 4\n',
    )
    config = write(
        tmp_path / "c.toml", NETWORK + 'dataset_config = "data.toml"\ntrain_data_dir = "other"\nresolution = "512"\n'
    )
    imported = read_job(config)
    imported.found.values["base.model"] = "own/er"
    job = imported.job("x")
    assert (job.recipe.resolution, job.recipe.captions.shuffle) == (640, True)
    assert [(Path(folder.path).name, folder.repeats) for folder in job.dataset.folders] == [("images", 4)]
    assert [setting.name for setting in imported.found.of("unavailable")] == ["train_data_dir"]


def test_a_prompt_file_becomes_previews(tmp_path: Path) -> None:
    write(tmp_path / "prompts.txt", "# comment\n\na cat --w 513 --h 768 --d 1 --l 7.5 --s 28 --n blurry, dark\nDäg\n")
    config = write(tmp_path / "c.toml", NETWORK + 'sample_prompts = "prompts.txt"\nsample_sampler = "euler_a"\n')
    first, second = values(config)["report.previews.prompts"]
    assert first == {
        "prompt": "a cat",
        "negative": "blurry, dark",
        "width": 512,
        "height": 768,
        "seed": 1,
        "guidance": 7.5,
        "steps": 28,
        "sampler": "euler_a",
    }
    assert second == {"prompt": "Däg", "sampler": "euler_a"}


def test_a_bad_flag_of_a_prompt_is_skipped_as_there() -> None:
    assert prompt_of("a cat --s many --zz 3", "euler") == {"prompt": "a cat", "sampler": "euler"}


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_lists_of_blocks_have_the_length_that_sd_scripts_asks_for(family: Any) -> None:
    # networks/lora.py: 12 down, 1 in the middle and 12 up; and for SDXL 1 + 9 + 3 + 9 + 1.
    assert len(BLOCKS[family]) == {"sd15": 25, "sdxl": 23}[family]


@pytest.mark.parametrize(
    ("old", "there"),
    [
        (r"D:\data", r"d:\Data\cats"),
        ("D:/data", r"D:\data\cats"),
        ("/workspace", "/workspace/cats"),
        (r"\\nas\lora", r"\\nas\lora\cats"),
    ],
)
def test_folders_of_another_pc_are_found_with_map(old: str, there: str, tmp_path: Path) -> None:
    (tmp_path / "new" / "cats" / "5_cat").mkdir(parents=True)
    config = write(tmp_path / "c.toml", f"{NETWORK}train_data_dir = '{there}'\n")
    (folder,) = values(config, moved=[(old, str(tmp_path / "new"))])["dataset.folders"]
    assert (folder["path"], folder["repeats"]) == (str(tmp_path / "new" / "cats" / "5_cat"), 5)


def test_folders_and_masks_in_a_dataset_file_of_another_pc_are_found_with_map(tmp_path: Path) -> None:
    subset = (
        "[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'D:\\data\\cats'\nconditioning_data_dir = 'd:/data/masks'\n"
    )
    write(tmp_path / "data.toml", subset)
    config = write(tmp_path / "c.toml", f"{NETWORK}dataset_config = 'data.toml'\n")
    (folder,) = read_job(config, moved=[("D:\\data", str(tmp_path / "new"))]).folders
    assert (folder.path, folder.mask_folder) == (str(tmp_path / "new" / "cats"), str(tmp_path / "new" / "masks"))
    (folder,) = read_job(config).folders
    assert (folder.path, folder.mask_folder) == ("D:\\data\\cats", "d:/data/masks")  # to be asked for


def test_a_command_in_a_script_is_found_among_other_lines(tmp_path: Path) -> None:
    script = write(
        tmp_path / "train ü.bat",
        "@echo off\nrem don't use train_network.py --network_dim=1\ncd sd-scripts\n"
        'call accelerate launch "train_network.py" ^\n  --network_module=networks.lora ^\n  --network_dim=6 ^\n'
        "  --caption_prefix=\"it's, \" --output_name=it's && pause\npause\n",
    )
    imported = read_job(script)
    assert (imported.found["network_dim"], imported.found["output_name"]) == (6, "it's")
    assert imported.found["caption_prefix"] == "it's, "
    assert {setting.name for setting in imported.found.settings} == {
        "network_module",
        "network_dim",
        "caption_prefix",
        "output_name",
    }


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "a.sh",
            "#!/bin/bash\nexport dim=6  # rank\nOUT='my cat'\npython train_network.py --network_dim=${dim} "
            '\\\n --output_name="$OUT" --caption_prefix=$GONE # done\n',
        ),
        (
            "a.ps1",
            '$dim = 6 # rank\n$OUT = "my cat"\npython train_network.py --network_dim=$dim `\n'
            ' --output_name="$OUT" --caption_prefix=$GONE\n',
        ),
        (
            "a.bat",
            'set dim=6\nset "OUT=my cat"\npython train_network.py --network_dim=%dim% ^\n'
            ' --output_name="%OUT%" --caption_prefix=%GONE%\n',
        ),
    ],
)
def test_variables_that_a_script_sets_are_filled_in(name: str, text: str, tmp_path: Path) -> None:
    found = read_job(write(tmp_path / name, text)).found
    assert (found["network_dim"], found["output_name"]) == (6, "my cat")
    assert "GONE" in found["caption_prefix"]


def test_a_lora_plus_ratio_of_the_text_encoders_alone_is_reported(tmp_path: Path) -> None:
    text = NETWORK + 'network_args = ["loraplus_unet_lr_ratio=16", "loraplus_text_encoder_lr_ratio=4"]\n'
    found = read_job(write(tmp_path / "c.toml", text)).found
    assert found.values["recipe.lora_plus_ratio"] == 16
    (setting,) = [each for each in found.of("changed") if each.name == "network_args"]
    assert "loraplus_text_encoder_lr_ratio = 4" in setting.note


def test_captions_of_a_metadata_file_are_written_beside_their_images_if_asked(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures = photographs(here / "images", count=2)
    (pictures / "astronaut.txt").unlink()
    captions = {"astronaut": {"caption": "a suit", "tags": "flag"}, "chelsea": {"caption": "new"}}
    write(here / "meta.json", json.dumps(captions))
    config = 'pretrained_model_name_or_path = "a/b"\ntrain_data_dir = "images"\nin_json = "meta.json"\n'
    write(here / "c.toml", NETWORK + config + 'caption_extension = ".txt"\n')
    assert cli.main(["new", "x", "--from", "c.toml"]) == 0
    assert "Captions not imported: 1." in capsys.readouterr().out
    assert not (pictures / "astronaut.txt").exists()
    assert cli.main(["new", "y", "--from", "c.toml", "--write-captions"]) == 0
    assert (pictures / "astronaut.txt").read_text("utf-8") == "a suit, flag\n"
    assert (pictures / "chelsea.txt").read_text("utf-8") == "a cat, close-up, whiskers\n"  # was there before


@pytest.mark.parametrize("text", ["[1]", '{"astronaut": 3}', '{"astronaut": {"caption": 3}}', "{"])
def test_a_metadata_file_without_captions_is_explained(
    text: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(here / "meta.json", text)
    photographs(here / "images", count=1)
    base = 'pretrained_model_name_or_path = "a/b"\ntrain_data_dir = "images"\nin_json = "meta.json"\n'
    write(here / "c.toml", NETWORK + base)
    assert cli.main(["new", "x", "--from", "c.toml"]) == 2
    said = capsys.readouterr().err
    assert "meta.json" in said
    assert "What to do: " in said


def test_arguments_pasted_one_a_line_are_read(tmp_path: Path) -> None:
    pasted = write(tmp_path / "a.txt", "python sdxl_train_network.py\n--network_dim 6\n  --enable_bucket\nbye\n")
    found = read_job(pasted).found
    assert (found["network_dim"], found["enable_bucket"]) == (6, True)


def test_options_of_a_command_win_over_those_of_its_config_file(tmp_path: Path) -> None:
    write(tmp_path / "c.toml", "[a]\nnetwork_dim = 4\nnetwork_alpha = 2\n")
    pasted = write(tmp_path / "a.txt", "python train_network.py --config_file c --network_dim 6")
    found = read_job(pasted).found
    assert (found["network_dim"], found["network_alpha"]) == (6, 2)


def test_new_writes_the_job_and_says_what_became_of_each_setting(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "data" / "3_cat").mkdir(parents=True)
    photograph("astronaut.png").save(here / "data" / "3_cat" / "a.png")
    config = write(
        here / "c.toml",
        NETWORK + 'pretrained_model_name_or_path = "D:/models/base.safetensors"\ntrain_data_dir = "data"\n'
        'wandb_api_key = "secret"\nxformers = true\nlearning_rat = 1\noutput_name = "cats"\n',
    )
    assert cli.main(["new", "cats job", "--from", str(config)]) == 0
    said = capsys.readouterr().out
    assert "Carried over:\n" in said
    assert "network_dim = 4 → recipe.rank = 4" in said
    assert "xformers = true; the fastest attention is measured on your GPU" in said
    assert "did you mean learning_rate?" in said
    assert "secret" not in said
    assert "D:/models/base.safetensors is not on this PC" in said
    job = load_job(here / "cats job" / "job.toml")
    assert (job.name, job.recipe.rank, job.recipe.alpha, job.recipe.steps) == ("cats", 4, 2, 1600)
    assert [folder.repeats for folder in job.dataset.folders] == [3]


def test_base_and_images_can_be_given_instead(here: Path) -> None:
    config = write(here / "c.toml", NETWORK + 'pretrained_model_name_or_path = "a/b"\ntrain_data_dir = "gone"\n')
    words = ["new", "x", "--from", str(config), "--base", "own/er", "--images", "pictures"]
    assert cli.main(words) == 0
    job = load_job(here / "x" / "job.toml")
    assert (job.base.model, [Path(folder.path).name for folder in job.dataset.folders]) == ("own/er", ["pictures"])


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("bucket_reso_steps = 1024", "recipe.images.bucket_step"),
        ('resolution = "9999999999"', "recipe.resolution"),
        ("min_snr_gamma = 5\ndebiased_estimation_loss = true", "recipe.objective.debiased_estimation"),
    ],
)
def test_values_that_impasto_does_not_allow_are_left_out_and_reported(line: str, key: str, tmp_path: Path) -> None:
    found = read_job(write(tmp_path / "c.toml", f"{NETWORK}enable_bucket = true\n{line}\n")).found
    assert key not in found.values
    (setting,) = [each for each in found.of("changed") if key in each.note]
    assert setting.note.endswith("; the default is used")


def test_a_lokr_of_whole_matrices_has_the_largest_rank(tmp_path: Path) -> None:
    text = 'network_module = "lycoris.kohya"\nnetwork_dim = 100000\nnetwork_alpha = 1\nnetwork_args = ["algo=lokr"]\n'
    found = values(write(tmp_path / "c.toml", text))
    assert (found["recipe.adapter"], found["recipe.rank"], found["recipe.alpha"]) == ("lokr", 1024, 1024)


GOOD = NETWORK + 'pretrained_model_name_or_path = "a/b"\ntrain_data_dir = "i"\n'
BAD: dict[str, tuple[str, bytes, str]] = {
    "binary": ("c.toml", bytes(range(256)) * 40, "c.toml"),
    "not UTF-8": ("c.toml", GOOD.encode() + b'output_name = "\xff\xfe"\n', "c.toml"),
    "no TOML": ("c.toml", b"network_dim = \n", "c.toml"),
    "empty": ("c.toml", b"", "no configuration"),
    "something else": ("c.toml", b'[package]\nname = "x"\n', "no configuration"),
    "a job": ("c.toml", b'schema = 1\nname = "x"\n[base]\nmodel = "a/b"\n[dataset]\n', "a job of Impasto already"),
    "a dataset": ("c.toml", b"[[datasets]]\nresolution = 512\n", "a dataset file of sd-scripts"),
    "deep": ("c.toml", GOOD.encode() + b"x = " + b"[" * 5000 + b"]" * 5000, "c.toml"),
    "huge": ("c.toml", GOOD.encode() + b"# " + b"x" * (65 << 20), "c.toml"),
    "a word as rank": ("c.toml", GOOD.replace("= 4", '= "four"').encode(), "network_dim must be a whole number"),
    "half a rank": ("c.toml", GOOD.replace("= 4", "= 4.5").encode(), "network_dim must be a whole number"),
    "an endless rank": ("c.toml", GOOD.replace("= 4", "= inf").encode(), "c.toml"),
    "a huge rank": ("c.toml", GOOD.replace("= 4", f"= {10**30}").encode(), "c.toml|rank"),
    "a list as rate": ("c.toml", (GOOD + "unet_lr = [1]").encode(), "unet_lr must be a number"),
    "words as rates": ("c.toml", (GOOD + 'text_encoder_lr = ["x"]').encode(), "text_encoder_lr must be a list"),
    "no rate": ("c.toml", (GOOD + "learning_rate = nan").encode(), "c.toml"),
    "a word as switch": ("c.toml", (GOOD + 'enable_bucket = "maybe"').encode(), "enable_bucket must be true or"),
    "a table as text": ("c.toml", (GOOD + "output_name = [[1]]").encode(), "output_name must be text"),
    "a word as size": ("c.toml", (GOOD + 'resolution = "a,b"').encode(), "resolution must be a whole number"),
    "a bad argument": (
        "c.toml",
        (GOOD + 'network_args = ["conv_dim=x"]').encode(),
        "network_args: conv_dim must be a whole number",
    ),
    "a deep argument": ("c.toml", (GOOD + f'network_args = ["conv_dim={"(" * 3000}"]').encode(), "conv_dim must be"),
    "JSON of something else": ("c.json", b'{"LoRA_type": 1}', "no configuration"),
    "broken JSON": ("c.json", b'{"LoRA_type": ', "c.json"),
    "deep JSON": ("c.json", b"[" * 100_000, "c.json"),
    "a bad number": ("c.json", b'{"LoRA_type": "Standard", "network_dim": "x"}', "network_dim must be a whole number"),
    "a list as kind": ("c.json", b'{"LoRA_type": [], "network_dim": 4}', "LoRA_type must be text"),
    "no base": ("c.toml", (NETWORK + 'train_data_dir = "i"').encode(), "names no base model"),
    "no images": ("c.toml", (NETWORK + 'pretrained_model_name_or_path = "a/b"').encode(), "names no images"),
    "no command": ("c.txt", b"hello\n", "starts no script"),
    "another script": ("c.sh", b"python flux_train_network.py --network_dim 4", "another kind of model"),
    "an open quote": ("c.sh", b'python train_network.py --output_name "x', "quotation mark"),
    "a missing file": ("c.sh", b"python train_network.py --config_file gone", "gone.toml"),
    "an unknown kind": ("c.yaml", b"a: 1\n", "no configuration"),
    "a missing dataset file": ("c.toml", (GOOD + 'dataset_config = "gone.toml"').encode(), "gone.toml"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_explained_and_nothing_is_written(
    kind: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, data, expected = BAD[kind]
    (here / name).write_bytes(data)
    assert cli.main(["new", "x", "--from", name]) == 2
    said = capsys.readouterr().err
    assert any(part in said for part in expected.split("|"))
    assert said.startswith("Error: ")
    assert "What to do: " in said
    assert len(said) < 2000
    assert not (here / "x").exists()
