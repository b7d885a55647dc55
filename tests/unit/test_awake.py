"""Keeping the computer awake: against the real call on Windows, a program that only holds elsewhere."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import until
from trainer import host

HOLDER = """#!/bin/sh
printf '%s\\n' "$@" > "$0.asked"
for last; do :; done
"$last"
echo let go > "$0.ended"
"""
USER = """
from trainer.host import keep_awake
with keep_awake("Training style"):
    print("inside", flush=True)
    input()
"""


@pytest.fixture
def holder(tmp_path, monkeypatch):
    """A systemd-inhibit that is the first to be found."""
    program = tmp_path / "systemd-inhibit"
    program.write_text(HOLDER, encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), "/bin", "/usr/bin"]))
    return program


@pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux's")
@pytest.mark.parametrize("end", ["well", "killed"])
def test_linux_is_keep_awake_until_the_program_ends_however_it_ends(holder, end):
    with subprocess.Popen(
        [sys.executable, "-c", USER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as user:
        assert user.stdout.readline() == "inside\n"
        children = _children(user.pid)
        assert len(children) == 1
        if end == "well":
            user.stdin.write("\n")
            user.stdin.flush()
        else:
            user.send_signal(signal.SIGKILL)
        until(holder.with_suffix(".ended").is_file)
    asked = holder.with_suffix(".asked").read_text(encoding="utf-8").splitlines()
    assert asked == ["--what=idle:sleep", "--mode=block", "--who=Impasto", "--why=Training style", "cat"]


@pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux's")
def test_a_system_that_refuses_or_has_nothing_is_left_in_peace(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with host.keep_awake("Training"):
        assert host._held("Training") == []
    refusing = tmp_path / "systemd-inhibit"
    refusing.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    refusing.chmod(0o755)
    broken = tmp_path / "gnome-session-inhibit"
    broken.write_text("no program at all", encoding="utf-8")
    broken.chmod(0o755)
    with host.keep_awake("Training"):
        pass


@pytest.mark.skipif(sys.platform != "win32", reason="Windows' own call")
def test_windows_keeps_the_state_while_inside():
    with host.keep_awake("Training"):
        assert host.set_execution_state(host._CONTINUOUS | host._SYSTEM_REQUIRED) & host._SYSTEM_REQUIRED
    assert host.set_execution_state(host._CONTINUOUS) == host._CONTINUOUS


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
