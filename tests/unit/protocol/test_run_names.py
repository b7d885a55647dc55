import os
import sys
from pathlib import Path

import pytest

from trainer.errors import RunError
from trainer.protocol import places
from trainer.protocol.files import numbered, safe_name, valid_job_name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("my-style", "my-style"),
        ("Größe 大きい 🎨", "Größe 大きい 🎨"),
        ("cafe\u0301", "caf\u00e9"),  # one form of é, whatever the keyboard sent
        ("a/b\\c", "a-b-c"),
        ("../../etc/passwd", "etc-passwd"),
        ("file.txt:stream", "file.txt-stream"),  # NTFS would hide an alternate data stream behind it
        ('a<b>"c"|d?e*f', "a-b-c-d-e-f"),
        ("tab\tnew\nline\0", "tab-new-line-"),
        ("ends with dots...", "ends with dots"),
        ("ends with space. ", "ends with space"),
        (".hidden", "hidden"),
        ("--help", "help"),
        ("CON", "_CON"),
        ("nul.txt", "_nul.txt"),
        ("com1", "_com1"),
        ("COM² .tar", "_COM² .tar"),
        ("lpt9.safetensors", "_lpt9.safetensors"),
        ("conin$", "_conin$"),
        ("Clock$", "_Clock$"),
        ("console", "console"),
        ("com10", "com10"),
        ("invoice\u202egpj.exe", "invoicegpj.exe"),
        ("broken\ud800name", "brokenname"),
        ("", "unnamed"),
        ("...", "unnamed"),
        ("   ", "unnamed"),
    ],
)
def test_names_fit_every_system(text, name):
    assert safe_name(text) == name


@pytest.mark.parametrize("text", ["x" * 300, "大" * 300, "é" * 119 + "大大", "a" * 118 + ". b"])
def test_long_names_are_cut_between_letters(text):
    name = safe_name(text)
    assert len(name.encode("utf-8")) <= 120
    assert text.startswith(name)
    assert len(name) > 30
    assert not name.endswith((".", " "))


@pytest.mark.parametrize("text", ["", "CON", "大" * 300, "a/b", "nul.", ". .", "-con"])
def test_a_safe_name_is_safe_already(text):
    assert safe_name(safe_name(text)) == safe_name(text)


def test_per_user_places_follow_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("IMPASTO_HOME", str(tmp_path / "home"))
    assert places.cache_folder() == tmp_path / "home" / "cache"
    assert places.models_folder() == tmp_path / "home" / "models"
    assert places.runs_list() == tmp_path / "home" / "runs.jsonl"
    monkeypatch.setenv("IMPASTO_CACHE", str(tmp_path / "fast disk"))
    assert places.cache_folder() == tmp_path / "fast disk"


@pytest.mark.parametrize(("text", "limit"), [(None, 60 * 10**9), ("", 60 * 10**9), (" 2.5 ", 25 * 10**8), ("0", 0)])
def test_the_caches_limit_is_the_users_or_sixty_gigabytes(monkeypatch, text, limit):
    monkeypatch.delenv("IMPASTO_CACHE_GB", raising=False)
    if text is not None:
        monkeypatch.setenv("IMPASTO_CACHE_GB", text)
    assert places.cache_limit() == limit


@pytest.mark.parametrize("text", ["much", "-1", "nan", "inf", "1e400"])
def test_a_limit_of_the_cache_that_is_no_number_is_refused(monkeypatch, text):
    monkeypatch.setenv("IMPASTO_CACHE_GB", text)
    with pytest.raises(RunError, match=f'IMPASTO_CACHE_GB: "{text}" is not a number') as refused:
        places.cache_limit()
    assert refused.value.code == "cache.limit"


@pytest.mark.parametrize(
    ("system", "variable", "value", "expected"),
    [
        ("win32", "LOCALAPPDATA", "local", "local/Impasto"),
        ("linux", "XDG_DATA_HOME", "data", "data/impasto"),
        ("linux", None, None, ".local/share/impasto"),
        ("darwin", None, None, "Library/Application Support/Impasto"),
        ("win32", None, None, "AppData/Local/Impasto"),
    ],
)
def test_per_user_places_follow_the_system(tmp_path, monkeypatch, system, variable, value, expected):
    for name in ("IMPASTO_HOME", "XDG_DATA_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(sys, "platform", system)
    if variable:
        monkeypatch.setenv(variable, str(tmp_path / value))
    assert places.home() == tmp_path / expected


def test_an_empty_variable_is_no_choice(monkeypatch):
    monkeypatch.setenv("IMPASTO_HOME", "")
    assert places.home() != Path(os.curdir).absolute()


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "   ",
        "x" * 300,
        "あ" * 300,
        "🐈" * 300,
        "a\nb\x00c\x9b",
        "C:\\a\\b",
        "/a" * 200,
        "..",
        "\u202e",
        "con",
        "a" * 98,
    ],
)
def test_a_name_that_is_made_up_suits_every_job_with_a_number_behind_it(text):
    from trainer.config.job import Job

    names = [name for name, _ in zip(numbered(valid_job_name(text), " "), range(3), strict=False)]
    jobs = [{"name": name, "base": {"model": "a/b"}, "dataset": {"folders": [{"path": "a"}]}} for name in names]
    assert [Job.model_validate(job).name for job in jobs] == names
    assert len({safe_name(name) for name in names}) == 3  # or a search for a free folder would never end
