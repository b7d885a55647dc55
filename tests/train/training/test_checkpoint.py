"""Checkpoints are whole or absent: damaged, half-written, and on a full disk."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import ROOT
from tests.support.bad_contents import BAD
from trainer.errors import ResumableError
from trainer.protocol.run_directory import newest_step, steps_on_disk
from trainer.training import checkpoint
from trainer.training.callbacks.checkpoints import is_restorable
from trainer.training.checkpoint import Checkpoint, load_latest, prune, save_checkpoint


def sample(step: int, size: int = 8) -> Checkpoint:
    weights = (torch.arange(size, dtype=torch.float32) + step).reshape(2, -1).T  # not in the order of memory
    return Checkpoint(step, {"a.lora_up.weight": weights}, {"0.exp_avg": weights * 2}, {"progress": {"step": step}})


def state_of(step: int) -> Checkpoint:
    """A checkpoint with a state as runs have it."""
    optimizer = {"optimizer": "AdamW", "state": [{"exp_avg": {"tensor": "0.exp_avg"}}], "groups": [{"lr": 1e-4}]}
    state = {"progress": {"step": step}, "optimizer": optimizer, "scaler": None, "fallbacks": []}
    return dataclasses.replace(sample(step), state=state)


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, sample(5))
    loaded, damaged = load_latest(tmp_path)
    assert loaded is not None and damaged == []
    assert loaded.step == 5 and loaded.state == {"progress": {"step": 5}}
    assert torch.equal(loaded.adapter["a.lora_up.weight"], sample(5).adapter["a.lora_up.weight"])
    assert torch.equal(loaded.optimizer["0.exp_avg"], sample(5).optimizer["0.exp_avg"])


@pytest.mark.parametrize("name", ["adapter.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_one_is_passed_over(tmp_path: Path, name: str, damage: str) -> None:
    save_checkpoint(tmp_path, sample(5))
    newest = save_checkpoint(tmp_path, sample(6))
    target = newest / name
    data = target.read_bytes()
    if damage == "gone":
        target.unlink()
    else:
        middle = len(data) // 2
        target.write_bytes(
            data[:-3] if damage == "cut" else data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        )
    loaded, damaged = load_latest(tmp_path)
    assert loaded is not None and loaded.step == 5
    assert damaged == [newest]
    flipped = damage == "flipped" and name != "manifest.json"
    assert newest_step(tmp_path) == (6 if flipped else 5)  # only the engine reads every byte


def whole(folder: Path, name: str, data: bytes) -> None:
    """Replace a file of a checkpoint and let the manifest say so: its hash holds, its content is of no use."""
    (folder / name).write_bytes(data)
    found = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    found["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(found), encoding="utf-8")


@pytest.mark.parametrize("name", ["state.json", "adapter.safetensors", "optimizer.safetensors", "manifest.json"])
@pytest.mark.parametrize("data", list(BAD.values()), ids=list(BAD))
def test_the_older_one_is_taken_whatever_is_wrong_with_the_newest(tmp_path: Path, name: str, data: bytes) -> None:
    save_checkpoint(tmp_path, state_of(5))
    newest = save_checkpoint(tmp_path, state_of(6))
    if name == "manifest.json":
        (newest / name).write_bytes(data)
    else:
        whole(newest, name, data)
    loaded, damaged = load_latest(tmp_path, is_restorable)
    assert loaded is not None and loaded.step == 5
    assert damaged == [newest]


@pytest.mark.parametrize(
    "change",
    [
        {"progress": {"step": 4}}, {"progress": {"step": "6"}}, {"progress": {}}, {"progress": []}, {"optimizer": {}},
        {"optimizer": {"optimizer": "AdamW", "state": [{"exp_avg": {"tensor": "gone"}}], "groups": []}},
        {"fallbacks": 3}, {"rungs": [{"step": 1}]}, {"fallbacks": [{"step": 1, "number": 1, "rung": {}}]},
        {"fallbacks": [{"step": 1, "number": 1, "fallback": {"micro_batch": "x"}}]},
    ],
)  # fmt: skip
def test_a_state_that_no_run_can_continue_from_is_passed_over(tmp_path: Path, change: dict[str, object]) -> None:
    save_checkpoint(tmp_path, state_of(5))
    newest = state_of(6)
    save_checkpoint(tmp_path, dataclasses.replace(newest, state={**newest.state, **change}))
    loaded, _ = load_latest(tmp_path, is_restorable)
    assert loaded is not None and loaded.step == 5


def test_want_of_memory_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older checkpoint would be taken, and the steps after it be lost, though the newest one is whole."""
    save_checkpoint(tmp_path, sample(5))
    save_checkpoint(tmp_path, sample(6))

    def exhausted(*_: object) -> bytes:
        raise MemoryError

    monkeypatch.setattr(checkpoint, "read_bytes", exhausted)
    with pytest.raises(MemoryError):
        load_latest(tmp_path)


def test_numbers_of_an_optimizer_may_be_infinite(tmp_path: Path) -> None:
    """Prodigy's growth_rate is, unless the job says otherwise."""
    state = {**state_of(5).state, "scaler": {"scale": math.inf}}
    save_checkpoint(tmp_path, dataclasses.replace(state_of(5), state=state))
    loaded, _ = load_latest(tmp_path, is_restorable)
    assert loaded is not None and loaded.state["scaler"] == {"scale": math.inf}


def test_saving_again_replaces_and_leftovers_do_not_count(tmp_path: Path) -> None:
    (tmp_path / ".step-00000007.123").mkdir()
    mine = tmp_path / f".step-00000005.{os.getpid()}"  # of a dead process that had the same number
    (mine / "strange").mkdir(parents=True)
    save_checkpoint(tmp_path, sample(5))
    assert [path.name for path in (tmp_path / "step-00000005").iterdir() if path.name == "strange"] == []
    save_checkpoint(tmp_path, sample(5, size=16))
    assert steps_on_disk(tmp_path) == [5]
    loaded, _ = load_latest(tmp_path)
    assert loaded is not None and loaded.adapter["a.lora_up.weight"].numel() == 16


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    for step in range(1, 7):
        save_checkpoint(tmp_path, sample(step))
    (tmp_path / ".step-00000009.99").mkdir()
    prune(tmp_path, 2, protect={3})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000005", "step-00000006"]


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "free_bytes", lambda _: 1000)
    with pytest.raises(ResumableError) as refused:
        save_checkpoint(tmp_path, sample(5))
    assert refused.value.code == "disk.full" and list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit on file sizes to stand for a full disk")
def test_a_disk_that_fills_up_while_writing_leaves_the_old_one(tmp_path: Path) -> None:
    """A child process may write files of 64 KiB at most, so the system refuses like a full disk does."""
    save_checkpoint(tmp_path, sample(5))
    script = """
import resource, signal, sys
from pathlib import Path
from tests.train.training.test_checkpoint import sample
from trainer.errors import ResumableError
from trainer.training.checkpoint import save_checkpoint
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
try:
    save_checkpoint(Path(sys.argv[1]), sample(6, size=100_000))
except ResumableError as error:
    sys.exit(0 if error.code == "disk.full" else 3)
sys.exit(4)
"""
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, check=False).returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def test_what_does_not_read_back_the_same_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes bytes and gives back others."""
    save_checkpoint(tmp_path, sample(5))
    write = checkpoint.atomic.write_bytes

    def lose_a_bit(path: Path, data: bytes) -> None:
        write(path, data[:-1] + bytes([data[-1] ^ 1]) if path.name == "adapter.safetensors" else data)

    monkeypatch.setattr(checkpoint.atomic, "write_bytes", lose_a_bit)
    with pytest.raises(ResumableError, match="does not read back the same"):
        save_checkpoint(tmp_path, sample(6))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def test_room_is_left_for_events_and_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, sample(5))
    size = sum(path.stat().st_size for path in (tmp_path / "step-00000005").iterdir() if path.name != "manifest.json")
    monkeypatch.setattr(checkpoint, "free_bytes", lambda _: size + checkpoint.SPARE_BYTES)
    save_checkpoint(tmp_path, sample(6))
    monkeypatch.setattr(checkpoint, "free_bytes", lambda _: size + checkpoint.SPARE_BYTES - 1)
    with pytest.raises(ResumableError, match="1 B more is needed"):
        save_checkpoint(tmp_path, sample(7))
