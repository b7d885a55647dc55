"""A real start of the app in a process of its own."""

from tests.support.app_start import measure

LATE = {"torch", "diffusers", "transformers", "numpy", "PIL", "regex", "tomlkit"}


def test_the_window_is_painted_before_anything_heavy_is_loaded():
    start = measure()
    assert "app.qt.window" in start.modules  # the list is what it should be
    assert LATE & start.modules == set()
    assert not [name for name in start.modules if name.startswith("app.qt.first_run")]
    assert start.switch_seconds <= 0.001  # Python's own five times that: the window would wait for busy workers
