"""Nothing that a run, a queue or a preset writes holds a secret of the base's link."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.jobs import photographs, write_job
from tests.support.server import Page, serving
from tests.support.tiny import tiny_base
from trainer import cli
from trainer.base.fetch import fetch_link
from trainer.config.credentials import safe_link
from trainer.errors import BaseModelError
from trainer.protocol import places
from trainer.protocol.run_directory import RunDirectory

USER, PASSWORD, TOKEN, SIGNATURE, PATH, FRAGMENT = secrets = (
    "anna-q7", "pA55-w0rd-q7", "t0ken-q7", "s1gnature-q7", "aB3dE9kLm2Qx7Rt5Yv8Zq7", "fr4gment-q7"
)  # fmt: skip
LINK = f"https://{USER}:{PASSWORD}@models.example.org/{PATH}/base.safetensors?fp=fp16&token={TOKEN}&sig={SIGNATURE}"
NAMES = tuple(safe_link(LINK).secrets)


@pytest.fixture
def downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a base where a finished download of the link is, for https needs a certificate; return the file."""
    for name in NAMES:
        monkeypatch.setenv(name, "")  # and taken away again, whatever a command sets
    source = tiny_base("sd15", tmp_path / "made", form="single", depth=1)
    folder = places.models_folder() / "links" / hashlib.sha256(safe_link(LINK).text.encode()).hexdigest()[:16]
    folder.mkdir(parents=True)
    path = Path(shutil.copy(source, folder / "base.safetensors"))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    notes = {"name": path.name, "size": path.stat().st_size, "sha256": digest}
    (folder / "download.json").write_text(json.dumps(notes), encoding="utf-8")
    return path


def leaks(*folders: Path) -> Iterator[str]:
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        data = path.read_bytes() + str(path).encode()
        yield from (f"{secret} in {path}" for secret in secrets if secret.encode() in data)


def test_a_base_by_a_link_with_secrets_leaves_them_in_no_file(downloaded, tmp_path, capfd, per_user_folder) -> None:
    work = tmp_path / "work"
    job = write_job(work, Path("base"), photographs(tmp_path / "images", count=4), name="secret")
    text = job.read_text(encoding="utf-8").replace("model = 'base'", f"model = '{LINK}#{FRAGMENT}'")
    job.write_text(f"# from {LINK}\n{text}", encoding="utf-8")
    short = ["--set", "recipe.steps=2"]
    assert cli.main(["queue", "add", str(job)]) == 0
    assert cli.main(["train", str(job), *short, "--set", f"base.model={LINK}"]) == 0
    run = RunDirectory(work / "runs" / "secret")
    for file in (run.job, run.run):  # as an earlier version left them
        file.write_text(file.read_text(encoding="utf-8").replace(safe_link(LINK).text, LINK), encoding="utf-8")
    assert len(list(leaks(run.path))) == 2 * 5
    assert cli.main(["resume", str(run.path), "--steps", "3"]) == 0
    assert cli.main(["inspect", str(run.output / "secret.safetensors")]) == 0
    assert cli.main(["presets", "share", str(run.path), "--out", str(work / "shared.toml")]) == 0
    said = "".join(capfd.readouterr())
    assert list(leaks(work, per_user_folder)) == []
    assert [secret for secret in secrets if secret in said] == []
    assert "contained a password or token" in said
    assert NAMES[0] in said


def test_a_download_sends_the_secrets_and_its_files_and_errors_hold_none(tmp_path, monkeypatch) -> None:
    body = tiny_base("sd15", tmp_path / "made", form="single", depth=1).read_bytes()
    path = f"/{PATH}/base.safetensors"
    with serving({path: Page(body)}) as server:
        link = f"{server.address.replace('http://', f'http://{USER}:{PASSWORD}@')}{path}?token={TOKEN}"
        safe = safe_link(link)
        for name, secret in safe.secrets.items():
            monkeypatch.setenv(name, secret)
        assert fetch_link(safe.text).read_bytes() == body
        (_, asked, headers), *_ = server.requests
        assert asked == f"{path}?token={TOKEN}"
        assert headers["Authorization"].startswith("Basic ")
        with pytest.raises(BaseModelError) as gone:
            fetch_link(safe.text.replace("base", "other"))
    assert [secret for secret in secrets if secret in f"{gone.value} {gone.value.remedy}"] == []
    assert list(leaks(places.models_folder())) == []
