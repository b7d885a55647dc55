"""Bases from the Hub, with the Hub's own client against a server on this machine that answers as the Hub does."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import huggingface_hub.constants
import pytest

from tests.support.server import Page, Server, json_page, refusing, serving
from tests.support.tiny import tiny_base
from trainer.base import fetch
from trainer.base.fetch import fetch_from_hub, needed_files
from trainer.errors import BaseModelError
from trainer.files.identify import identify_base
from trainer.protocol import places

COMMIT = "a" * 40
MODEL = "someone/tiny-sd"


def hub_pages(files: dict[str, bytes], commit: str = COMMIT) -> dict[str, Page]:
    """The pages of one repository: what is in it, and each file with the headers that the client checks."""
    siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
    info = json_page({"id": MODEL, "sha": commit, "siblings": siblings, "tags": []})
    pages = {f"/api/models/{MODEL}": info}
    pages |= {f"/api/models/{MODEL}/revision/{revision}": info for revision in ("main", "v1", commit)}
    for name, data in files.items():
        pages[f"/{MODEL}/resolve/{commit}/{name}"] = Page(
            data, headers={"X-Repo-Commit": commit}, etag=f'"{hashlib.sha256(data).hexdigest()}"'
        )
    return pages


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tiny_base("sd15", tmp_path_factory.mktemp("hub"))
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    other = {
        "README.md": b"x" * 100,
        "unet/diffusion_pytorch_model.bin": b"x",
        "unet/diffusion_pytorch_model.fp16.safetensors": b"x",
    }
    return files | other


@pytest.fixture
def server(repository: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with serving(hub_pages(repository)) as server:
        yield server


def asked_for_files(server: Server) -> set[str]:
    return {
        path.rpartition(f"/{COMMIT}/")[2]
        for method, path, _ in server.requests
        if method == "GET" and "/resolve/" in path
    }


def test_only_the_needed_files_come_and_make_a_base(server: Server) -> None:
    told: list[tuple[str, int, int]] = []
    path, commit = fetch_from_hub(MODEL, None, lambda *progress: told.append(progress), server.address)
    assert commit == COMMIT
    assert identify_base(path).family == "sd15"
    assert not asked_for_files(server) & {"README.md", "unet/diffusion_pytorch_model.bin"}
    assert not any("fp16" in name for name in asked_for_files(server))
    assert told[-1][1] == told[-1][2] == sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert path.is_relative_to(places.models_folder())


def test_a_known_commit_asks_nobody_and_a_branch_works_offline(server: Server) -> None:
    path, commit = fetch_from_hub(MODEL, None, None, server.address)
    server.requests.clear()
    assert fetch_from_hub(MODEL, commit, None, server.address) == (path, commit)
    assert server.requests == []
    with refusing() as dead:
        assert fetch_from_hub(MODEL, None, None, dead) == (path, commit)


def test_a_second_time_downloads_nothing(server: Server) -> None:
    fetch_from_hub(MODEL, None, None, server.address)
    server.requests.clear()
    fetch_from_hub(MODEL, None, None, server.address)
    assert asked_for_files(server) == set()


@pytest.mark.expects_logs("Trying to resume download")
def test_an_interrupted_download_goes_on(server: Server, repository: dict[str, bytes]) -> None:
    name = "unet/diffusion_pytorch_model.safetensors"
    server.pages[f"/{MODEL}/resolve/{COMMIT}/{name}"].breaks = [2_000_000]
    path, _ = fetch_from_hub(MODEL, None, None, server.address)
    assert (path / name).read_bytes() == repository[name]


def test_single_files_are_found_and_several_are_asked_about(server: Server) -> None:
    server.pages.clear()
    server.pages |= hub_pages({"README.md": b"", "dream.safetensors": b"1234"})
    path, _ = fetch_from_hub(MODEL, None, None, server.address)
    assert (path.name, path.read_bytes()) == ("dream.safetensors", b"1234")
    with pytest.raises(BaseModelError, match="contains 2 models") as caught:
        needed_files(MODEL, ["a.safetensors", "b.safetensors"])
    assert f"huggingface.co/{MODEL}/resolve/main/a.safetensors" in caught.value.remedy


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["unet/diffusion_pytorch_model.fp16.safetensors"], ["unet/diffusion_pytorch_model.fp16.safetensors"]),
        (
            [f"unet/diffusion_pytorch_model-0000{n}-of-00002.safetensors" for n in (1, 2)]
            + ["unet/diffusion_pytorch_model.safetensors.index.json"],
            [f"unet/diffusion_pytorch_model-0000{n}-of-00002.safetensors" for n in (1, 2)]
            + ["unet/diffusion_pytorch_model.safetensors.index.json"],
        ),
        (
            ["unet/diffusion_pytorch_model.non_ema.safetensors", "unet/diffusion_pytorch_model.safetensors"],
            ["unet/diffusion_pytorch_model.safetensors"],
        ),
    ],
)
def test_which_weights_are_taken(names: list[str], expected: list[str]) -> None:
    chosen = needed_files(MODEL, ["model_index.json", "unet/config.json", *names])
    assert chosen == ["model_index.json", "unet/config.json", *expected]


def test_repositories_without_safetensors() -> None:
    with pytest.raises(BaseModelError, match=r"no \.safetensors weights for its unet"):
        needed_files(MODEL, ["model_index.json", "unet/config.json", "unet/diffusion_pytorch_model.bin"])
    with pytest.raises(BaseModelError, match="neither a diffusers model nor"):
        needed_files(MODEL, ["v1-5.ckpt"])


@pytest.mark.parametrize(
    ("page", "says"),
    [
        (Page(b"{}", 404, {"X-Error-Code": "RepoNotFound"}), "Could not find"),
        (Page(b"{}", 401, {"X-Error-Message": "Invalid username or password."}), "Could not find"),
        (Page(b"{}", 404, {"X-Error-Code": "RevisionNotFound"}), "has no revision"),
        (Page(b"{}", 403, {"X-Error-Code": "GatedRepo"}), "after you accept its terms"),
        (Page(b"{}", 500), "Could not download .* from the Hugging Face Hub"),
    ],
)
def test_refusals_of_the_hub(server: Server, page: Page, says: str) -> None:
    server.pages.clear()
    server.pages[f"/api/models/{MODEL}"] = server.pages[f"/api/models/{MODEL}/revision/v1"] = page
    with pytest.raises(BaseModelError, match=says) as caught:
        fetch_from_hub(MODEL, "v1", None, server.address)
    assert caught.value.remedy


def test_offline_and_never_downloaded() -> None:
    with pytest.raises(BaseModelError, match="cannot be reached") as caught:
        fetch_from_hub(MODEL)  # HF_HUB_OFFLINE is set for all tests
    assert "Connect" in caught.value.remedy


def test_the_hub_fails_in_the_middle(server: Server) -> None:
    server.pages[f"/{MODEL}/resolve/{COMMIT}/unet/config.json"] = Page(b"", 403)
    with pytest.raises(BaseModelError, match="cannot be reached") as caught:
        fetch_from_hub(MODEL, None, None, server.address)
    assert caught.value.code == "base.offline"


def test_too_little_room(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch.places, "free_bytes", lambda path: 1000)
    with pytest.raises(BaseModelError, match="GB more"):
        fetch_from_hub(MODEL, None, None, server.address)


def test_a_record_whose_files_are_gone_is_no_base(server: Server) -> None:
    path, commit = fetch_from_hub(MODEL, None, None, server.address)
    (path / "model_index.json").unlink()
    assert (fetch_from_hub(MODEL, commit, None, server.address)[0] / "model_index.json").is_file()
