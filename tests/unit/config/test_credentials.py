"""Base links and their secrets: what counts as one, where it goes, and who may use it."""

from __future__ import annotations

import re
from pathlib import Path

import keyring
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keyring.backend import KeyringBackend

from trainer.cli.common import checked
from trainer.config.base import BaseConfig
from trainer.config.credentials import address_of, base_name, protect, safe_link, without_secrets
from trainer.config.edit import LONGEST
from trainer.config.load import load_job, parse_job, secure_job_file
from trainer.errors import BaseModelError, JobError

# What a link looks like in files, after the secrets that it was written with.
LINKS = {
    "https://civitai.com/api/download/models/1?type=Model&size=pruned&fp=fp16&token=sEcReT": (
        "https://civitai.com/api/download/models/1?type=Model&size=pruned&fp=fp16&token=${CIVITAI_COM_TOKEN}",
        {"CIVITAI_COM_TOKEN": "sEcReT"},
    ),
    "https://www.civitai.com/m?TOKEN=sEcReT": (
        "https://www.civitai.com/m?TOKEN=${CIVITAI_COM_TOKEN}",
        {"CIVITAI_COM_TOKEN": "sEcReT"},
    ),
    "https://anna:sEcReT@my-host.org:8443/m.safetensors": (
        "https://${MY__HOST_ORG_USER}:${MY__HOST_ORG_PASSWORD}@my-host.org:8443/m.safetensors",
        {"MY__HOST_ORG_USER": "anna", "MY__HOST_ORG_PASSWORD": "sEcReT"},
    ),
    "https://h.org/d/aB3dE9kLm2Qx7Rt5Yv8Z/m.safetensors#key=sEcReT": (
        "https://h.org/d/${H_ORG_PATH_186587E6}/m.safetensors",
        {"H_ORG_PATH_186587E6": "aB3dE9kLm2Qx7Rt5Yv8Z"},
    ),
    "https://h.org/m.safetensors?X-Amz-Signature=sEcReT": (
        "https://h.org/m.safetensors?X-Amz-Signature=${H_ORG_X__AMZ__SIGNATURE_705091B5}",
        {"H_ORG_X__AMZ__SIGNATURE_705091B5": "sEcReT"},
    ),
    "civitai.com/api/download/models/1?token=sEcReT": (
        "civitai.com/api/download/models/1?token=${CIVITAI_COM_TOKEN}",
        {"CIVITAI_COM_TOKEN": "sEcReT"},
    ),
}
PUBLIC = (
    "https://huggingface.co/o/n/resolve/0123456789abcdef0123456789abcdef01234567/m.safetensors?download=true",
    "https://h.org/stable-diffusion-v1-5-2023/RealisticVisionV60B1_v51VAE.safetensors#sha256=" + "a" * 64,
    "https://h.org/get?token=${H_ORG_TOKEN}",
    "https://huggingface.co",
    "owner/name",
    "C:\\models\\x.safetensors",
    "./what?.safetensors",
)


class MemoryKeyring(KeyringBackend):
    """Stores passwords as a system's keyring does, for one test."""

    priority = 1.0  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[tuple[str, str], str] = {}

    def set_password(self, service: str, username: str, password: str) -> None:
        self.kept[service, username] = password

    def get_password(self, service: str, username: str) -> str | None:
        return self.kept.get((service, username))


@pytest.fixture
def system_keyring(monkeypatch: pytest.MonkeyPatch):
    former, backend = keyring.get_keyring(), MemoryKeyring()
    keyring.set_keyring(backend)
    for name in ("CIVITAI_COM_TOKEN", "H_ORG_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    yield backend
    keyring.set_keyring(former)


@pytest.mark.parametrize("link", LINKS)
def test_each_secret_of_a_link_is_replaced_by_a_name(link: str) -> None:
    safe = safe_link(link)
    assert (safe.text, dict(safe.secrets)) == LINKS[link]
    assert "sEcReT" not in repr(safe)
    assert safe_link(safe.text).text == safe.text
    if "://" in link:
        assert address_of(safe) == link.partition("#")[0]
    with pytest.raises(JobError, match="contains a password or token") as refused:
        checked(BaseConfig, model=link)
    assert "sEcReT" not in str(refused.value)


@pytest.mark.parametrize("text", PUBLIC)
def test_what_has_no_secret_stays_as_it_is(text: str) -> None:
    assert safe_link(text).text == text
    assert safe_link(text).secrets == {}
    assert protect(text) == (text, None)


@given(
    st.builds("{}{}".format, st.sampled_from(["", "https://", "h.org/m?", "https://h.org/m?a="]), st.text(max_size=40))
)
def test_any_text_can_be_shown_and_has_a_name(text: str) -> None:
    assert without_secrets(without_secrets(text)) == without_secrets(text)
    base_name(text)


@pytest.mark.parametrize(
    ("model", "name"),
    {
        "https://h.org/a/Mod%C3%A9le.safetensors?token=x": "Modéle.safetensors",
        "https://h.org/aB3dE9kLm2Qx7Rt5Yv8Z?token=x": "h.org",
        "https://anna:x@h.org": "h.org",
        "owner/name": "owner/name",
        "/models/x.safetensors": "x.safetensors",
        "C:\\models\\x.safetensors": "x.safetensors",
    }.items(),
)
def test_a_base_is_named_without_folders_and_secrets(model: str, name: str) -> None:
    assert base_name(model) == name


def test_a_token_goes_to_the_system_keyring_and_comes_back_for_the_download(system_keyring: MemoryKeyring) -> None:
    link, message = protect("https://civitai.com/m?token=sEcReT")
    assert link == "https://civitai.com/m?token=${CIVITAI_COM_TOKEN}"
    assert message is not None and "system keyring as CIVITAI_COM_TOKEN" in message and "sEcReT" not in message
    assert system_keyring.kept == {("impasto", "CIVITAI_COM_TOKEN"): "sEcReT"}
    assert address_of(safe_link(link)) == "https://civitai.com/m?token=sEcReT"


def test_the_environment_comes_before_the_keyring(system_keyring, monkeypatch: pytest.MonkeyPatch) -> None:
    system_keyring.set_password("impasto", "H_ORG_TOKEN", "old")
    monkeypatch.setenv("H_ORG_TOKEN", "new token")
    assert address_of(safe_link("https://h.org/m?token=${H_ORG_TOKEN}")) == "https://h.org/m?token=new%20token"


def test_without_a_keyring_the_token_serves_this_start_and_the_message_says_so(monkeypatch) -> None:
    monkeypatch.setenv("CIVITAI_COM_TOKEN", "")
    link, message = protect("https://civitai.com/m?token=sEcReT")
    assert message is not None and "Set the environment variable CIVITAI_COM_TOKEN" in message
    assert address_of(safe_link(link)) == "https://civitai.com/m?token=sEcReT"


@pytest.mark.parametrize(
    "link",
    [
        "https://evil.org/?x=${CIVITAI_COM_TOKEN}",
        "https://civitai.com.evil.org/?x=${CIVITAI_COM_TOKEN}",
        "https://civitai-com.org/?x=${CIVITAI_COM_TOKEN}",
        "https://evil.org/${HOME}/m.safetensors",
    ],
)
def test_a_link_cannot_take_the_secret_of_another_site(link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CIVITAI_COM_TOKEN", "sEcReT")
    with pytest.raises(BaseModelError, match="does not belong to its host"):
        address_of(safe_link(link))


def test_a_missing_secret_is_named_with_what_to_do(system_keyring: MemoryKeyring) -> None:
    with pytest.raises(BaseModelError, match="needs CIVITAI_COM_TOKEN") as missing:
        address_of(safe_link("https://civitai.com/m?token=${CIVITAI_COM_TOKEN}"))
    assert "keyring set impasto CIVITAI_COM_TOKEN" in missing.value.remedy


JOB = """# my job, token sEcReT-oNe
schema = 1
name = "ü"
[base]
{line}  # the base
[[dataset.folders]]
path = "pictures"
"""
LINK = "https://civitai.com/m?type=Model&token=sEcReT-oNe"


@pytest.mark.parametrize(
    "line",
    [f'model = "{LINK}"', f"model = '{LINK}'", 'model = "' + LINK.replace("&", "\\u0026") + '"', f'"model"="{LINK}"'],
)
def test_a_job_with_a_token_is_rewritten_when_it_is_read(line: str, tmp_path: Path, system_keyring) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(line=line), encoding="utf-8")
    message = secure_job_file(path)
    assert message is not None and "job.toml" in message
    written = path.read_text(encoding="utf-8")
    assert "sEcReT" not in written
    assert 'name = "ü"' in written and "my job" in written
    job = load_job(path)
    assert job.base.model == "https://civitai.com/m?type=Model&token=${CIVITAI_COM_TOKEN}"
    assert secure_job_file(path) is None
    assert path.read_text(encoding="utf-8") == written
    assert address_of(safe_link(job.base.model)) == LINK


def test_a_token_that_cannot_be_taken_out_of_a_job_is_not_called_removed(tmp_path: Path, system_keyring) -> None:
    path = tmp_path / "job.toml"
    text = 'base = { model = "https://\\u0061nna:sEcReT@h.org/m.safetensors" } # mine\n'
    path.write_text(text, encoding="utf-8")
    secure_job_file(path)
    written = path.read_text(encoding="utf-8")
    assert re.fullmatch(r'base = { model = "https://[^"]*@h.org/m.safetensors" } # mine\n', written)
    assert "sEcReT" not in written and "nna" not in written
    text += "#" * LONGEST  # too long to edit
    path.write_text(text, encoding="utf-8")
    with pytest.raises(JobError, match="Could not remove") as refused:
        secure_job_file(path)
    assert refused.value.code == "job.secret" and "sEcReT" not in str(refused.value)
    assert path.read_text(encoding="utf-8") == text


def test_a_token_given_for_one_start_does_not_reach_the_job(system_keyring) -> None:
    text = JOB.format(line='model = "owner/name"')
    job = parse_job(text, "job.toml", Path.cwd(), [f"base.model={LINK}"])
    assert "sEcReT" not in job.model_dump_json()
