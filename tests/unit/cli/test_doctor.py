import json
import platform
import sys
from importlib import metadata

import pytest

from trainer import cli, gpu, host
from trainer.cli import doctor
from trainer.errors import ImpastoError
from trainer.memory.device import calibration
from trainer.protocol import places

GIB = 1 << 30


def card(free=20 * GIB, uses=()):
    return gpu.Gpu(0, "GPU-0", "NVIDIA GeForce RTX 4090", 24 * GIB, free, "581.15", (13, 1), (8, 9), tuple(uses))


def found(**options):
    return list(doctor.examine(self_test=False, **options))


def build(tmp_path, monkeypatch, text):
    """A torch whose files say this of its build."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(text, encoding="utf-8")
    real = metadata.distribution

    class Built:
        version = "2.13.0"

        def locate_file(self, path):
            return tmp_path / path

    monkeypatch.setattr(metadata, "distribution", lambda name: Built() if name == "torch" else real(name))


@pytest.fixture(autouse=True)
def no_card(monkeypatch):
    monkeypatch.setattr(gpu, "list_gpus", list)


def test_this_machine_is_told_of(capsys):
    assert cli.main(["doctor", "--quick"]) == 0
    told = capsys.readouterr().out
    assert f"Python {platform.python_version()} (64-bit)" in told
    assert f"torch {metadata.version('torch')}" in told
    assert "This PC can train." in told


def test_programs_are_told_a_line_a_check(capsys, monkeypatch):
    def lost():
        raise ImpastoError("gpu.driver", "The NVIDIA driver does not work.", "Restart the computer.")

    monkeypatch.setattr(gpu, "list_gpus", lost)
    assert cli.main(["doctor", "--quick", "--json"]) == 1
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(told) > 4
    assert {
        "verdict": "broken",
        "sentence": "The NVIDIA driver does not work.",
        "remedy": "Restart the computer.",
    } in told


def test_a_card_is_described_with_who_uses_it_and_what_cuda_takes(monkeypatch):
    uses = [gpu.GpuProcess(1, "game.exe", 2 * GIB), gpu.GpuProcess(2, "dwm.exe", None)]
    monkeypatch.setattr(gpu, "list_gpus", lambda: [card(uses=uses)])
    told = [check for check in found() if check.sentence.startswith("GPU 0")]
    assert [check.verdict for check in told] == ["ok"] * 3
    assert "20.0 GiB of 24.0 GiB free, compute capability 8.9, bf16, Ada" in told[0].sentence
    assert told[1].sentence == "GPU 0 is used by: game.exe 2.0 GiB, dwm.exe"
    assert "CUDA itself takes about 480 MiB" in told[2].sentence


def test_a_card_that_others_fill_is_doubtful(monkeypatch):
    monkeypatch.setattr(gpu, "list_gpus", lambda: [card(free=2 * GIB, uses=[gpu.GpuProcess(1, "game.exe", 20 * GIB)])])
    doubtful = [check for check in found() if check.sentence.startswith("GPU 0") and check.verdict == "doubtful"]
    assert [check.remedy for check in doubtful] == [
        "Close programs that you do not need: game.exe uses 20.0 GiB.",
        "Before training, close other programs that use the GPU.",
    ]


def test_the_context_that_finished_runs_had_is_told(monkeypatch):
    monkeypatch.setattr(gpu, "list_gpus", lambda: [card()])
    monkeypatch.setattr(calibration, "corrections", lambda *_: calibration.Correction(context_bytes=123 << 20))
    assert any("CUDA itself takes about 123 MiB" in check.sentence for check in found())


def test_windows_is_asked_about_its_page_file_and_the_driver_about_spilling(monkeypatch):
    monkeypatch.setattr(gpu, "list_gpus", lambda: [card()])
    monkeypatch.setattr(platform, "system", lambda: "Windows")
    monkeypatch.setattr(host, "main_memory", lambda: host.MainMemory(32 * GIB, 16 * GIB, 40 * GIB, 8 * GIB))
    promises, spilling = (check for check in found() if "main memory" in check.sentence)
    assert promises.verdict == "doubtful"
    assert "22 GiB larger" in promises.remedy
    assert "Sysmem Fallback" in spilling.remedy


def test_a_torch_for_cpus_beside_a_card_is_broken(tmp_path, monkeypatch, capsys):
    build(tmp_path, monkeypatch, "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n")
    monkeypatch.setattr(gpu, "list_gpus", lambda: [card()])
    assert cli.main(["doctor", "--quick"]) == 1
    told = capsys.readouterr().out
    assert "BROKEN    PyTorch" in told
    assert "cannot use the GPU" in told
    assert "run.py rebuild" in told


def test_a_torch_for_cards_is_told_with_its_cuda(tmp_path, monkeypatch):
    build(tmp_path, monkeypatch, "__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\n")
    assert any("built for CUDA 13.0" in check.sentence for check in found())


def test_a_broken_driver_and_missing_libraries_are_told(monkeypatch):
    def cards():
        raise ImpastoError("gpu.driver", "The NVIDIA driver does not work.", "Restart.")

    def version(name):
        if name in ("torch", "peft"):
            raise metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(gpu, "list_gpus", cards)
    monkeypatch.setattr(metadata, "version", version)
    broken = [check.sentence for check in found() if check.verdict == "broken"]
    assert broken == [
        "Not installed: torch, peft",
        "The NVIDIA driver does not work.",
        "PyTorch is not installed, or its files are damaged",
    ]


def test_little_room_is_doubtful_and_a_file_in_the_way_is_broken(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "free_bytes", lambda _: 1 * GIB)
    assert sum(check.verdict == "doubtful" and "1.0 GiB free" in check.sentence for check in found()) == 3
    monkeypatch.undo()
    monkeypatch.setattr(gpu, "list_gpus", list)
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("IMPASTO_CACHE", str(tmp_path / "file" / "cache"))
    (told,) = (check for check in found() if check.verdict == "broken")
    assert "(the cache): " in told.sentence


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import sys; sys.exit('torch is missing its DLL')", "PyTorch does not work: torch is missing its DLL"),
        ("import os; os._exit(7)", "it stopped unexpectedly (exit code 7)"),
        ("import threading; threading.Event().wait()", "did not finish within"),
    ],
)
def test_a_self_test_that_fails_crashes_or_hangs_is_told(monkeypatch, script, words):
    monkeypatch.setattr(doctor, "_SELF_TEST", script)
    monkeypatch.setattr(doctor, "_SELF_TEST_SECONDS", 0.5 if "wait" in script else 60)
    (told,) = doctor._run_self_test([])
    assert told.verdict == "broken"
    assert words in told.sentence


def test_a_card_that_torch_does_not_see_and_bitsandbytes_that_fails_are_told(monkeypatch):
    answer = '{"gpus": [], "bitsandbytes": "OSError: no library"}'
    monkeypatch.setattr(doctor, "_SELF_TEST", f"print({answer!r})")
    verdicts = [(check.verdict, check.sentence) for check in doctor._run_self_test([card()])]
    assert verdicts[1:] == [
        ("broken", "PyTorch sees 0 GPUs of 1"),
        ("doubtful", "bitsandbytes does not work: OSError: no library"),
    ]


def test_an_old_python_is_broken(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    assert doctor._check_python().verdict == "broken"
