"""Bases by direct link, against a real server on this machine."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.raw import write_shapes
from tests.support.server import Page, Server, refusing, serving
from trainer.base.fetch import fetch_base, fetch_link
from trainer.errors import BaseModelError
from trainer.files.weights import sha256_file
from trainer.protocol import locks, places


@pytest.fixture
def body(tmp_path: Path) -> bytes:
    return write_shapes(tmp_path / "source.safetensors", {"x": (1_500_000,)}).read_bytes()


@pytest.fixture
def server(body: bytes) -> Iterator[Server]:
    with serving(
        {"/files/Mödel.safetensors".replace("ö", "%C3%B6"): Page(body), "/m.safetensors": Page(body)}
    ) as server:
        yield server


def downloads() -> list[str]:
    return sorted(path.name for path in (places.models_folder() / "links").rglob("*") if path.is_file())


def ranges(server: Server) -> list[str]:
    return [headers["Range"] for _, _, headers in server.requests if "Range" in headers]


def test_a_file_is_downloaded_once_and_then_needs_no_server(body: bytes) -> None:
    with serving({"/files/M%C3%B6del.safetensors": Page(body)}) as server:
        link = f"{server.address}/files/Mödel.safetensors?token=secret"
        told: list[tuple[str, int, int]] = []
        path = fetch_link(link, lambda *progress: told.append(progress))
        assert path.name == "Mödel.safetensors"
        assert path.read_bytes() == body
        assert told[-1] == ("download", len(body), len(body))
        assert downloads() == ["Mödel.safetensors", "download.json", "lock"]
        assert "secret" not in (path.parent / "download.json").read_text(encoding="utf-8")
    assert fetch_link(link) == path
    assert fetch_base(link).path == path
    assert len(server.requests) == 1
    calls: list[int] = []
    assert sha256_file(path, lambda done, total: calls.append(done)) == hashlib.sha256(body).hexdigest()
    assert calls == []  # it was hashed while it was checked


def test_an_interrupted_download_goes_on_by_itself(server: Server, body: bytes) -> None:
    server.pages["/m.safetensors"].breaks = [1_000_000, 500_000]
    path = fetch_link(f"{server.address}/m.safetensors")
    assert path.read_bytes() == body
    assert ranges(server) == ["bytes=1000000-", "bytes=1500000-"]


def test_a_download_given_up_goes_on_at_the_next_start(server: Server, body: bytes) -> None:
    server.pages["/m.safetensors"].breaks = [1_000_000, 0]
    with pytest.raises(BaseModelError, match="1,000,000 bytes are kept") as caught:
        fetch_link(f"{server.address}/m.safetensors")
    assert caught.value.code == "base.interrupted"
    assert downloads() == ["download.json", "download.part", "lock"]
    assert fetch_link(f"{server.address}/m.safetensors").read_bytes() == body
    assert ranges(server) == ["bytes=1000000-"] * 2


def test_no_server_at_all(server: Server) -> None:
    link = f"{server.address}/m.safetensors"
    server.pages.clear()
    with refusing() as dead, pytest.raises(BaseModelError, match="Could not finish") as caught:
        fetch_link(f"{dead}/m.safetensors")
    assert "connection" in caught.value.remedy
    with pytest.raises(BaseModelError, match="no such file"):
        fetch_link(link)


@pytest.mark.parametrize("etag", ['"two"', None])
def test_a_file_that_changed_meanwhile_is_begun_anew(server: Server, body: bytes, etag: str | None) -> None:
    page = server.pages["/m.safetensors"]
    page.etag = '"one"' if etag else None
    page.breaks = [1_000_000, 0]
    with pytest.raises(BaseModelError, match="Could not finish"):
        fetch_link(f"{server.address}/m.safetensors")
    changed = body[:1000] + b"\x01" * (len(body) - 1000)  # other values behind the same header
    server.pages["/m.safetensors"] = Page(changed, etag=etag)
    assert fetch_link(f"{server.address}/m.safetensors").read_bytes() == changed


def test_a_server_without_ranges(server: Server, body: bytes) -> None:
    server.pages["/m.safetensors"] = Page(body, ranges=False, breaks=[1_000_000])
    assert fetch_link(f"{server.address}/m.safetensors").read_bytes() == body


def test_a_part_longer_than_the_file_is_dropped(server: Server, body: bytes) -> None:
    server.pages["/m.safetensors"].breaks = [1_000_000, 0]
    with pytest.raises(BaseModelError):
        fetch_link(f"{server.address}/m.safetensors")
    (part,) = (places.models_folder() / "links").rglob("download.part")
    part.write_bytes(bytes(len(body) + 5))
    assert fetch_link(f"{server.address}/m.safetensors").read_bytes() == body


def test_the_expected_hash(server: Server, body: bytes) -> None:
    link = f"{server.address}/m.safetensors"
    digest = hashlib.sha256(body).hexdigest()
    with pytest.raises(BaseModelError, match=digest) as caught:
        fetch_link(f"{link}#sha256={'0' * 64}")
    assert caught.value.code == "base.wrong_hash"
    assert "download.part" not in downloads()
    path = fetch_link(f"{link}#sha256={digest.upper()}")
    assert path.read_bytes() == body
    with pytest.raises(BaseModelError, match=digest):  # also when it is here already
        fetch_link(f"{link}#sha256={'0' * 64}")


@pytest.mark.parametrize(
    ("page", "says"),
    [
        (Page(b"gone", 404), "no such file"),
        (Page(b"who?", 401), "requires a login"),
        (Page(b"no", 403), "requires a login"),
        (Page(b"busy", 503), "error 503"),
        (Page(b"<html>", headers={"Content-Type": "text/html; charset=utf-8"}), "a web page"),
        (Page(b"<!doctype html><html>", headers={"Content-Type": "application/octet-stream"}), "a web page"),
        (Page(b"version https://git-lfs.github.com/spec/v1\noid sha256:1"), "Git LFS pointer"),
        (Page(b"x", headers={"Content-Disposition": 'attachment; filename="model.ckpt"'}), r"not a \.safetensors file"),
    ],
)
def test_what_is_no_model_is_refused_and_leaves_no_part(server: Server, page: Page, says: str) -> None:
    server.pages["/m.safetensors"] = page
    with pytest.raises(BaseModelError, match=says) as caught:
        fetch_link(f"{server.address}/m.safetensors")
    assert caught.value.remedy
    assert not [name for name in downloads() if name not in ("lock", "download.json")]


def test_the_servers_name_for_the_file_is_used_and_made_safe(server: Server, body: bytes) -> None:
    name = "attachment; filename*=UTF-8''..%2F..%2Fb%C3%B6se.safetensors"
    server.pages["/api/download/12"] = Page(body, headers={"Content-Disposition": name})
    path = fetch_link(f"{server.address}/api/download/12")
    assert path.parent.parent == places.models_folder() / "links"
    assert path.name.endswith("böse.safetensors")


def test_redirects_are_followed_but_not_to_an_open_line(server: Server, body: bytes) -> None:
    server.pages["/there"] = Page(status=302, headers={"Location": f"{server.address}/m.safetensors"})
    assert fetch_link(f"{server.address}/there").read_bytes() == body
    server.pages["/away"] = Page(status=302, headers={"Location": "http://example.invalid/m.safetensors"})
    with pytest.raises(BaseModelError, match="not https"):
        fetch_link(f"{server.address}/away")


@pytest.mark.parametrize("link", ["http://example.invalid/m.safetensors", "ftp://127.0.0.1/m.safetensors"])
def test_links_that_can_be_changed_on_the_way_are_refused(link: str) -> None:
    with pytest.raises(BaseModelError, match="not https"):
        fetch_link(link)


def test_too_little_room_is_said_before_anything_is_written(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.disk_usage

    def nearly_full(path: object) -> object:
        return real("/" if os.name == "posix" else "C:\\")._replace(free=1000)

    monkeypatch.setattr(shutil, "disk_usage", nearly_full)
    with pytest.raises(BaseModelError, match="GB more") as caught:
        fetch_link(f"{server.address}/m.safetensors")
    assert caught.value.code == "base.disk_full"
    assert "download.part" not in downloads()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit on a process's file sizes")
def test_a_disk_that_fills_up_keeps_the_part(server: Server, body: bytes) -> None:
    code = (
        "import resource, sys; from trainer.base.fetch import fetch_base; from trainer.errors import BaseModelError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))\n"
        "try: fetch_base(sys.argv[1])\n"
        "except BaseModelError as error: print(error.code, error.sentence)"
    )
    link = f"{server.address}/m.safetensors"
    done = subprocess.run([sys.executable, "-c", code, link], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("base.disk_full")
    assert fetch_link(link).read_bytes() == body
    assert ranges(server) == ["bytes=2000000-"]


def test_a_folder_that_cannot_be_written(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    monkeypatch.setenv("IMPASTO_HOME", str(blocked))
    with pytest.raises(BaseModelError, match="Could not write") as caught:
        fetch_base(f"{server.address}/m.safetensors?token=secret")
    assert "IMPASTO_HOME" in caught.value.remedy
    assert "secret" not in caught.value.sentence


def test_two_processes_do_not_write_one_file(server: Server) -> None:
    link = f"{server.address}/m.safetensors"
    folder = places.models_folder() / "links" / hashlib.sha256(link.encode()).hexdigest()[:16]
    folder.mkdir(parents=True)
    with locks.hold_lock(folder / "lock", 0), pytest.raises(BaseModelError, match="Another process"):
        fetch_link(link)
