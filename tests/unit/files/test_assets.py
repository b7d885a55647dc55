import pytest

from trainer.files import assets


@pytest.fixture
def package(tmp_path, monkeypatch):
    root = tmp_path / "Größe mit Leerzeichen" / "trainer"
    root.mkdir(parents=True)
    monkeypatch.setattr(assets, "_PACKAGE", root)
    return root


def write(path):
    path.parent.mkdir(parents=True)
    path.write_text("x", encoding="utf-8")
    return path


def test_a_checkout_keeps_its_data_beside_the_package(package):
    vocab = write(package.parent / "assets" / "clip" / "vocab.json")
    assert assets.asset_path("clip", "vocab.json") == vocab


def test_a_wheel_keeps_its_data_inside_and_ignores_what_lies_beside(package):
    write(package.parent / "presets" / "recipes" / "style.toml")  # another project's site-packages/presets
    inside = write(package / "_presets" / "recipes" / "style.toml")
    assert assets.preset_path("recipes", "style.toml") == inside


def test_a_missing_file_names_itself(package):
    with pytest.raises(FileNotFoundError, match=r"nothing\.json is missing"):
        assets.asset_path("nothing.json")


def test_both_folders_of_this_installation_are_there():
    assert assets.asset_path().is_dir()
    assert assets.preset_path().is_dir()
