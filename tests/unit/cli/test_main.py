from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys

import pytest

from tests.support.images import photograph
from trainer import cli
from trainer.cli import common
from trainer.errors import JobError, ResumableError, TrainingError
from trainer.protocol.reading import noting_file

# As the README shows them.
COMMANDS = (
    "new", "train", "queue", "sweep", "lr-find", "plan", "resume", "stop", "pause", "save", "sample", "watch", "runs",
    "check", "inspect", "lora", "render", "demo", "methods", "presets", "doctor", "prune",
)  # fmt: skip


def failing(error):
    def command():
        raise error

    return command


def in_child(*words, **options):
    return subprocess.run([sys.executable, "-m", "trainer", *words], capture_output=True, **options)


def test_help_names_every_command():
    done = in_child("--help")
    assert done.returncode == 0
    text = done.stdout.decode("utf-8")
    assert all(f"\n    {command} " in text for command in COMMANDS)
    assert "exit codes: 0 done, 75" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: python -m trainer {command}")
    assert "  " in text


def commands_of(parser):
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [command for group in groups for command in group.choices.values()]


def test_every_option_is_explained():
    parsers = commands_of(cli._parser())
    assert len(parsers) == len(COMMANDS)
    inner = [command for parser in parsers for command in commands_of(parser)]
    for parser in parsers + inner:
        assert all(action.help for action in parser._actions), parser.prog
        assert parser.description


def test_no_command_loads_torch_or_other_weights_before_it_is_needed(tmp_path):
    job, sound, rubbish = tmp_path / "job.toml", tmp_path / "sound.toml", tmp_path / "rubbish.safetensors"
    job.write_text("schema = 1\n[recipe]\nrank = 'four'\n", encoding="utf-8")
    on_rubbish = (
        "schema = 1\nname = 'a'\n[base]\nmodel = 'rubbish.safetensors'\n[[dataset.folders]]\npath = 'pictures'\n"
    )
    sound.write_text(on_rubbish, encoding="utf-8")
    rubbish.write_bytes(b"<html>log in</html>")
    (tmp_path / "empty").mkdir()
    drawing = ["render", "--base", "base", "--prompt", "a cat"]
    harmless = [["runs"], ["queue", "list"]]
    wrong = [
        ["check", "missing"], ["inspect", "missing"], ["stop", "x"],
        ["train", "missing"], ["train", str(job)], ["train", str(job), "--set", "fly"], ["resume", "missing"],
        ["train", str(sound)], ["train", str(sound), "--set", "base.model=none.safetensors"],
        *(["train", str(sound), "--set", "base.model=on/hub", "--set", f"dataset.folders=[{{path='{folder}'}}]"]
          for folder in ("missing", "empty", "job.toml")),
        [*drawing, "--sampler", "fly"], [*drawing, "--lora", f"{job}:strong"],
    ]  # fmt: skip
    code = (
        "import json, sys\nfrom trainer import cli\n"
        "codes = [cli.main(words) for words in json.loads(sys.argv[1])]\n"
        "heavy = {'torch', 'diffusers', 'transformers', 'peft', 'accelerate', 'bitsandbytes', 'scipy'}\n"
        "print(json.dumps([codes, sorted(heavy & set(sys.modules))]))\n"
    )
    words = json.dumps(harmless + wrong)
    done = subprocess.run([sys.executable, "-c", code, words], capture_output=True, text=True, check=True)
    codes, loaded = json.loads(done.stdout.splitlines()[-1])
    assert codes == [0] * len(harmless) + [2] * len(wrong)
    assert loaded == []
    said = ["is a web page", "none.safetensors", "missing does not exist", "has no images", "is a file"]
    assert [words for words in said if words not in done.stderr] == []


@pytest.mark.parametrize(
    "words", [[], ["fly"], ["train"], ["resume", "x", "--steps", "many"], ["resume", "x", "--steps", "0"]]
)
def test_words_that_make_no_command_end_in_code_2(words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_a_users_error_is_a_sentence_its_problems_and_the_remedy(capsys):
    error = JobError("job.invalid", "job.toml has 2 problems:\n  a: wrong", "Correct it.", ("a: wrong", "b: missing"))
    assert common.guarded(failing(error), debug=False) == 2
    expected = "Error: job.toml has 2 problems:\n  a: wrong\n  b: missing\nWhat to do: Correct it.\n"
    assert capsys.readouterr() == ("", expected)


@pytest.mark.parametrize(
    ("error", "code"),
    [(ResumableError("a", "b", "c"), 75), (TrainingError("a", "b", "c"), 1), (KeyboardInterrupt(), 75)],
)
def test_each_error_has_its_exit_code(error, code, capsys):
    assert common.guarded(failing(error), debug=False) == code
    assert "Traceback" not in capsys.readouterr().err


def test_what_the_disk_refuses_is_told_with_the_file(tmp_path, capsys):
    missing = tmp_path / "Größe" / "x"
    assert common.guarded(lambda: len(missing.read_bytes()), debug=False) == 2
    said = capsys.readouterr().err
    assert str(missing) in said
    assert "What to do:" in said
    assert common.guarded(failing(OSError(28, "No space left on device", "/big")), debug=False) == 2
    assert "The disk is full: /big." in capsys.readouterr().err


def test_a_fault_of_ours_is_one_sentence_and_its_traceback_is_kept(capsys, per_user_folder):
    fault = RuntimeError("the dog ate it")
    assert common.guarded(failing(fault), debug=False) == 1
    said, kept = capsys.readouterr().err, per_user_folder / "fault.txt"
    assert "went wrong: the dog ate it." in said
    assert f"The traceback is in {kept}." in said
    assert "Traceback" not in said
    assert "the dog ate it" in kept.read_text(encoding="utf-8").splitlines()[-1]
    for number in range(12):
        common.guarded(failing(RuntimeError(f"fault {number}")), debug=False)
    text = kept.read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if line.startswith("RuntimeError")] == [
        f"RuntimeError: fault {number}" for number in range(2, 12)
    ]
    kept.unlink()
    kept.mkdir()  # nothing can be written there
    capsys.readouterr()
    assert common.guarded(failing(fault), debug=False) == 1
    assert "--debug" in capsys.readouterr().err
    vars(fault)["traceback_kept"] = "The traceback is in console.log."
    assert common.guarded(failing(fault), debug=False) == 1
    assert "The traceback is in console.log." in capsys.readouterr().err
    assert common.guarded(failing(fault), debug=True) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_fault_while_a_file_is_read_names_the_file(capsys, tmp_path):
    def command() -> int:
        with noting_file(tmp_path / "größe.toml"):
            raise RuntimeError("the dog ate it")

    assert common.guarded(command, debug=False) == 1
    assert f"went wrong while reading {tmp_path / 'größe.toml'}: the dog" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--debug", "runs"], ["runs", "--debug"], ["runs"]])
def test_debug_may_stand_before_or_behind_the_command(words, monkeypatch):
    asked = []
    monkeypatch.setattr(cli, "guarded", lambda command, *, debug: asked.append(debug) or 0)
    cli.main(words)
    assert asked == ["--debug" in words]


def test_output_is_utf_8_whatever_the_console_was_told(tmp_path):
    done = in_child("stop", "größe 大", env=os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert "größe 大" in done.stderr.decode("utf-8")
    assert done.returncode == 2


def test_a_reader_that_leaves_ends_us_in_peace():
    with subprocess.Popen(
        [sys.executable, "-c", "import sys\nfrom trainer.cli.common import guarded\n"
         "def flood():\n    while True: print('x' * 1000, flush=True)\n"
         "sys.exit(guarded(flood, debug=False))"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as child:  # fmt: skip
        child.stdout.read(10)
        child.stdout.close()
        assert child.stderr.read() == b""
    assert child.returncode == 0


@pytest.mark.skipif(sys.platform == "win32", reason="closes the streams by a shell's words")
def test_without_any_streams_a_command_does_what_it_is_to_do(tmp_path):
    """As a program without a window starts us; Python then has None for them. `check` shows a bar."""
    photograph().save(tmp_path / "a.png")
    words = f"check '{tmp_path}' --resolution 64"
    done = subprocess.run(["sh", "-c", f'exec "$0" -m trainer {words} <&- >&- 2>&-', sys.executable])
    assert done.returncode == 0


@pytest.mark.skipif(sys.platform == "win32", reason="needs a terminal that can be closed under a program")
def test_an_error_that_nobody_can_read_keeps_its_exit_code():
    terminal, ours = os.openpty()
    code = "import sys\nfrom trainer import cli\nsys.stdin.read()\nsys.exit(cli.main(['stop', 'nothing']))"
    pipes = {"stdin": subprocess.PIPE, "stdout": ours, "stderr": ours}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as child:
        os.close(ours)
        os.close(terminal)
    assert child.returncode == 2


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.startswith("Impasto ")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a signal that ends a process")
def test_a_crash_within_a_library_says_where_it_happened():
    own = "import os, signal, runpy, sys\nimport trainer.protocol.run_directory as rundir\n"
    own += "rundir.known_runs = lambda: os.kill(os.getpid(), signal.SIGSEGV)\n"
    own += "sys.argv = ['trainer', 'runs']\nrunpy.run_module('trainer', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", own], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in done.stderr
    assert "run_runs" in done.stderr
