"""The guards of tests/conftest.py, watched from outside: which tests they let pass."""

import re
import shutil
import subprocess
import sys

import pytest

from tests.support import ROOT

SUITE = """
import logging
import os
import warnings
import pytest


def test_quiet(): pass
def test_warning(): warnings.warn("old")
def test_log(): logging.getLogger("trainer.x").warning("hot")
def test_library_log():
    logger = logging.getLogger("diffusers")
    logger.propagate = False
    logger.error("broken")

@pytest.mark.expects_logs("hot")
def test_expected(): logging.getLogger("x").warning("it is hot here")
@pytest.mark.expects_logs("hot")
def test_another_log(): logging.getLogger("x").warning("it is cold here")
@pytest.mark.expects_logs("hot")
def test_missed(): pass

def test_home_is_empty_first(per_user_folder):
    assert os.environ["IMPASTO_HOME"] == str(per_user_folder)
    (per_user_folder / "file").write_text("x")
def test_home_is_empty_second(per_user_folder): assert not list(per_user_folder.iterdir())

def test_left_behind(): os.environ.update(LEFT_BEHIND="1", PATH="elsewhere")
def test_nothing_is_left(): assert "LEFT_BEHIND" not in os.environ and os.environ["PATH"] != "elsewhere"
def test_taken_back(monkeypatch): monkeypatch.setenv("LEFT_BEHIND", "1")

@pytest.mark.parametrize("variant", [pytest.param("slow", marks=pytest.mark.slow)])
def test_slow(variant): pass
"""


@pytest.mark.parametrize("options", [[], ["--all"]])
def test_guards_fail_what_they_should_and_nothing_else(options, tmp_path):
    (tmp_path / "test_it.py").write_text(SUITE, encoding="utf-8")
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", *options, str(tmp_path)]
    output = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", check=False).stdout
    lines = [line for line in output.splitlines() if "::test_" in line]
    failed = {line.split("::")[1].split()[0] for line in lines if line.startswith(("FAILED", "ERROR"))}
    passed = {re.split(r"[ \[]", line.split("::")[1])[0] for line in lines if line.startswith("PASSED")} - failed
    logged = {"test_warning", "test_log", "test_library_log", "test_another_log", "test_missed"}
    assert failed == logged | {"test_left_behind"}
    alone = {"test_home_is_empty_first", "test_home_is_empty_second", "test_nothing_is_left", "test_taken_back"}
    assert passed == {"test_quiet", "test_expected"} | alone | ({"test_slow"} if options else set())
