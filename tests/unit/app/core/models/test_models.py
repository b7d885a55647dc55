"""Bases and LoRA folders of other tools: found where they lie, told by their headers, never touched."""

from __future__ import annotations

import os
import queue
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.core.models.models import Models
from app.core.models.search import ModelCache, Search, _is_worth, installations
from app.core.models.tools import Installation, SearchRoots, recognize, search_roots
from app.core.models.verdict import FoundBase, cleaned, judge
from tests.support import tool_homes
from trainer.files.assets import asset_path
from trainer.protocol import places


def search(where: SearchRoots, *folders: Path) -> tuple[dict[str, FoundBase], list[Installation]]:
    """Search as the app does; what was found by file name."""
    shared: list[tuple[tuple[Installation, ...], tuple[FoundBase, ...]]] = []
    Search(where, folders, lambda: False, lambda tools, found: shared.append((tools, found))).run()
    tools, found = shared[-1]
    return {one.path.name: one for one in found if one.name != "Demo"}, list(tools)


def everything(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def test_comfy_with_folders_elsewhere(tmp_path: Path) -> None:
    root = tool_homes.comfy_portable(tmp_path / "home", tmp_path / "disk D")
    found, tools = search(SearchRoots(searched=(tmp_path / "home",)))
    assert {name: (one.tool, one.description.family) for name, one in found.items()} == {
        "illustrious é.safetensors": ("ComfyUI", "sdxl"),
        "dreamy.safetensors": ("ComfyUI", "sd15"),
    }
    assert [one.loras for one in tools] == [(root / "models" / "loras", tmp_path / "disk D" / "my models" / "LoRA")]


def test_the_desktop_apps_data_by_its_settings(tmp_path: Path) -> None:
    settings = tmp_path / "home" / ".config"
    root = tool_homes.comfy_desktop(settings, tmp_path / "far" / "away")
    found, tools = search(SearchRoots(asked=(settings / "ComfyUI",)))
    assert found["noobai-v.safetensors"].description.velocity is True
    assert [one.loras for one in tools] == [(root / "models" / "loras",)]


def test_the_folders_that_forges_launcher_names(tmp_path: Path) -> None:
    tool_homes.forge(tmp_path / "home", tmp_path / "disk")
    found, (tool,) = search(SearchRoots(searched=(tmp_path / "home",)))
    assert {name: one.description.family for name, one in found.items()} == {
        "pony.safetensors": "sdxl",
        "sd-v1-5.safetensors": "sd15",
        "old.ckpt": None,
    }
    assert "pickle" in found["old.ckpt"].description.problem
    assert tool.tool == "A1111/Forge"
    assert tool.loras[0] == tmp_path / "disk" / "loras"


def test_a1111_as_installed(tmp_path: Path) -> None:
    root = tool_homes.a1111(tmp_path)
    found, (tool,) = search(SearchRoots(searched=(tmp_path,)))
    assert list(found) == ["anything.safetensors"]
    assert tool.loras == (root / "models" / "Lora",)


@pytest.mark.parametrize("version", ["3", "6"])
def test_invoke_before_and_after_its_folders_became_flat(tmp_path: Path, version: str) -> None:
    root = tool_homes.invoke_3(tmp_path) if version == "3" else tool_homes.invoke_6(tmp_path)
    found, (tool,) = search(SearchRoots(searched=(tmp_path,)))
    usable = [name for name, one in found.items() if not one.description.problem]
    assert usable == ["juggernaut.safetensors" if version == "3" else "realvis.safetensors"]
    assert len(found) == (1 if version == "3" else 2)
    assert tool.loras == ((root / "autoimport" / "lora",) if version == "3" else ())


def test_swarm_with_two_roots_and_the_comfy_within(tmp_path: Path) -> None:
    root = tool_homes.swarm(tmp_path)
    found, tools = search(SearchRoots(searched=(tmp_path,)))
    assert {name: one.tool for name, one in found.items()} == {
        "sd_xl_base_1.0.safetensors": "SwarmUI",
        "extra.safetensors": "SwarmUI",
        "inner.safetensors": "ComfyUI",
    }
    assert tools[0].loras == (root / "Models" / "Lora",)


def test_stability_matrix_by_its_library_file_each_model_once(tmp_path: Path) -> None:
    home = tmp_path / "home"
    settings = search_roots(home, {}).asked[1].parent
    root = tool_homes.stability_matrix(settings, tmp_path / "disk")
    found, tools = search(SearchRoots(asked=search_roots(home, {}).asked))
    assert {name: one.tool for name, one in found.items()} == {"animagine.safetensors": "Stability Matrix"}
    assert {one.tool: one.loras[0] for one in tools} == {
        "Stability Matrix": root / "Models" / "Lora",
        "ComfyUI": root / "Packages" / "ComfyUI" / "models" / "loras",
    }


def test_kohya_with_a_file_that_is_no_base(tmp_path: Path) -> None:
    tool_homes.kohya(tmp_path)
    found, (tool,) = search(SearchRoots(searched=(tmp_path,)))
    assert tool.tool == "kohya_ss"
    assert found["nai.safetensors"].description.problem == ""
    assert found["flux1-dev.safetensors"].description.problem == '"flux1-dev.safetensors" is a Flux model.'


def test_the_base_that_one_trainer_used_last(tmp_path: Path) -> None:
    tool_homes.one_trainer(tmp_path / "home", tmp_path / "disk")
    found, _ = search(SearchRoots(searched=(tmp_path / "home",)))
    assert {name: one.tool for name, one in found.items()} == {"used before.safetensors": "OneTrainer"}


def test_the_hub_cache_in_its_newest_revision(tmp_path: Path) -> None:
    new = tool_homes.hub(tmp_path / "hub cache")
    (cache,) = search_roots(tmp_path, {"HF_HUB_CACHE": str(tmp_path / "hub cache")}).hubs
    found, _ = search(SearchRoots(hubs=(cache,)))
    assert [(one.path, one.name) for one in found.values()] == [(new, "someone/great-sdxl")]


def test_a_diffusers_folder_and_what_is_not_supported(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(asset_path("demo", "base"), mine / "a folder" / "small")
    tool_homes.sd2(mine / "sd2.safetensors")
    tool_homes.lora(mine / "lora.safetensors")
    found, _ = search(SearchRoots(), mine)
    assert {name: (one.description.family, one.description.problem) for name, one in found.items()} == {
        "small": ("sd15", ""),
        "sd2.safetensors": (None, '"sd2.safetensors" is an SD 2 model.'),
        "lora.safetensors": (None, '"lora.safetensors" is a LoRA, not a base.'),
    }


def test_nothing_on_the_disk_is_changed(tmp_path: Path) -> None:
    tool_homes.forge(tmp_path / "home", tmp_path / "disk")
    tool_homes.swarm(tmp_path / "home" / "AI")
    before = everything(tmp_path)
    search(SearchRoots(searched=(tmp_path / "home",)))
    assert everything(tmp_path) == before


def test_the_nearest_tools_first_and_none_too_deep(tmp_path: Path) -> None:
    tool_homes.a1111(tmp_path / "a" / "b" / "c" / "d")
    tool_homes.kohya(tmp_path / "z")
    found = [one.tool for one in installations(SearchRoots(searched=(tmp_path,)), lambda: False)]
    assert found == ["kohya_ss"]  # the other lies five levels deep
    deeper = [one.tool for one in installations(SearchRoots(searched=(tmp_path / "a",)), lambda: False)]
    assert deeper == ["A1111/Forge"]


def test_links_in_circles_and_folders_of_others(tmp_path: Path) -> None:
    root = tool_homes.a1111(tmp_path)
    try:
        (root / "models" / "Stable-diffusion" / "again").symlink_to(root / "models", target_is_directory=True)
        (tmp_path / "up").symlink_to(tmp_path, target_is_directory=True)
    except OSError:
        pytest.skip("this user may not make links")
    found, tools = search(SearchRoots(searched=(tmp_path,)))
    assert len(tools) == 1
    assert "anything.safetensors" in found


@pytest.mark.skipif(sys.platform != "win32", reason="Windows' own kind of link")
def test_junctions_lead_nowhere(tmp_path: Path) -> None:
    import _winapi

    root = tool_homes.a1111(tmp_path)
    _winapi.CreateJunction(str(tmp_path), str(root / "models" / "up"))
    assert [entry.name for entry in os.scandir(root / "models") if not _is_worth(entry)] == ["up"]


@pytest.mark.parametrize(
    "content",
    ["", "\x00\xff", "a:\n" * 3, "InvokeAI: 3\n", "models_dir:\n  deep: er\n", "x: " * 1000, "{}: ]["],
)
def test_settings_that_mean_nothing(tmp_path: Path, content: str) -> None:
    tool_homes.text(tmp_path / "invokeai.yaml", content)
    tool_homes.text(tmp_path / "c" / "extra_model_paths.yaml", content)
    tool_homes.text(tmp_path / "s" / "Data" / "Settings.fds", content)
    tool_homes.text(tmp_path / "w" / "modules" / "x.py", "")
    tool_homes.text(tmp_path / "w" / "webui-user.bat", f"set COMMANDLINE_ARGS={content}")
    assert recognize(tmp_path) == Installation("InvokeAI", tmp_path)
    for name, tool in (("c", "ComfyUI"), ("s", "SwarmUI"), ("w", "A1111/Forge")):
        assert recognize(tmp_path / name) == Installation(tool, tmp_path / name)  # type: ignore[arg-type]


def test_a_known_base_is_told_from_the_cache_until_it_changes(tmp_path: Path) -> None:
    path = tool_homes.sd15(tmp_path / "m" / "a.safetensors")
    search(SearchRoots(), tmp_path / "m")
    stamp = path.stat()
    tool_homes.flux(path)
    path.write_bytes(path.read_bytes().ljust(stamp.st_size, b" ")[: stamp.st_size])
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # as if nothing had happened: the cache answers
    assert ModelCache().describe(path)[0].family == "sd15"
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1_000_000))
    assert "too long" in ModelCache().describe(path)[0].problem
    tool_homes.flux(path)
    assert "Flux" in ModelCache().describe(path)[0].problem


def test_a_damaged_cache_costs_nothing(tmp_path: Path) -> None:
    tool_homes.text(places.cache_folder() / "models.json", '{"version": 3, "told": [')
    tool_homes.sd15(tmp_path / "a.safetensors")
    assert list(search(SearchRoots(), tmp_path)[0]) == ["a.safetensors"]


def test_a_stopped_search_ends_and_keeps_nothing(tmp_path: Path) -> None:
    tool_homes.kohya(tmp_path)
    Search(SearchRoots(searched=(tmp_path,)), (), lambda: True, lambda tools, found: None).run()
    assert not (places.cache_folder() / "models.json").exists()


@pytest.fixture
def posted() -> queue.SimpleQueue[Callable[[], None]]:
    return queue.SimpleQueue()


@pytest.fixture
def models(posted: queue.SimpleQueue[Callable[[], None]]) -> Iterator[Models]:
    made = Models(posted.put)
    yield made
    made.close()


def settle(models: Models, posted: queue.SimpleQueue[Callable[[], None]]) -> None:
    while models.is_searching:
        posted.get(timeout=120)()


def test_the_whole_of_it(
    tmp_path: Path,
    models: Models,
    posted: queue.SimpleQueue[Callable[[], None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("IMPASTO_LOOK_IN", str(tmp_path / "home"))
    webui = tool_homes.a1111(tmp_path / "home")
    tool_homes.kohya(tmp_path / "home")
    assert models.destinations() == []
    settle(models, posted)
    assert [one.folder for one in models.destinations()] == [webui / "models" / "Lora"]
    assert [(one.name, bool(one.description.problem)) for one in models.bases] == [
        ("anything", False),
        ("Demo", False),
        ("nai", False),
        ("flux1-dev", True),
    ]
    (a1111,) = [one for one in models.installations if one.tool == "A1111/Forge"]
    models.set_offered(a1111, False)
    assert "anything" not in [one.name for one in models.bases]
    assert models.destinations() == []
    models.add_folder(tool_homes.sdxl(tmp_path / "mine" / "own.safetensors").parent)
    models.add_destination(tmp_path / "to")
    models.add_recent("someone/base")
    settle(models, posted)
    assert "own" in [one.name for one in models.bases]
    models.close()
    again = Models(posted.put)
    again.close()
    assert again.recent == ("someone/base",)
    assert again.folders == (tmp_path / "mine",)
    assert not again.is_offered(a1111)
    assert [one.folder for one in models.destinations()] == [tmp_path / "to"]


def test_choices_that_cannot_be_read_are_set_aside() -> None:
    path = tool_homes.text(places.home() / "models.json", '{"recent": "no list"}')
    models = Models(lambda work: None)
    models.close()
    assert models.recent == ()
    assert "models.damaged.json" in models.notice
    assert not path.exists()


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (' "C:\\models\\a b.safetensors" ', "C:\\models\\a b.safetensors"),
        ("  owner/name\n", "owner/name"),
        ('"', '"'),
        ("", ""),
    ],
)
def test_what_is_pasted(written: str, meant: str) -> None:
    assert cleaned(written) == meant


def test_a_file_link_is_a_path(tmp_path: Path) -> None:
    path = tmp_path / "ü b.safetensors"
    assert Path(cleaned(path.as_uri())) == path


@pytest.mark.parametrize(
    ("text", "place", "problem"),
    [
        ("", "nowhere", ""),
        ("http://a/b.safetensors", "nowhere", "does not start with https://"),
        ("https://a.example/b.safetensors", "link", ""),
        ("https://huggingface.co/o/n/blob/main/a.safetensors", "link", "web page"),
        ("https://huggingface.co/o/n", "link", "model page"),
        ("https://huggingface.co/o/n/tree/main", "link", "model page"),
        ("https://civitai.com/models/12345/a-style?modelVersionId=9", "link", "model page"),
        ("https://civitai.com/api/download/models/9", "link", ""),
        ("https://a.example/b.ckpt", "link", "not to a .safetensors"),
        ("owner/name", "hub", ""),
        ("model.safetensors", "nowhere", "not a full path"),
    ],
)
def test_what_a_text_means(text: str, place: str, problem: str) -> None:
    verdict = judge(text)
    assert (verdict.place, bool(verdict.description.problem)) == (place, bool(problem))
    assert problem in verdict.description.problem


def test_what_a_path_leads_to(tmp_path: Path) -> None:
    good = judge(str(tool_homes.sdxl_v(tmp_path / "v.safetensors")))
    assert (good.place, good.description.family, good.description.velocity) == ("here", "sdxl", True)
    assert good.bytes > 0
    assert judge(str(tmp_path / "none.safetensors")).description.problem == '"none.safetensors" does not exist.'
    assert "LoRA" in judge(str(tool_homes.lora(tmp_path / "l.safetensors"))).description.problem
