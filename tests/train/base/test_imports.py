"""Compilation put off until the first call: the same function, compiled in the same way, and never twice."""

import gc
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from trainer.base.imports import deferred_compilation, quick_imports


def double(tensor: torch.Tensor, *, plus: float = 0.0) -> torch.Tensor:
    """Twice as much."""
    return tensor * 2 + plus


class Backend:
    """A compiler that runs what it is given, and remembers it."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
        self.graphs.append(graph)
        return graph.forward


@pytest.mark.parametrize("form", ["call", "decorator with options"])
@pytest.mark.parametrize("dynamic", [True, False])
def test_a_function_is_compiled_when_it_is_first_called_and_as_was_said(form, dynamic):
    torch.compiler.reset()
    backend = Backend()
    with deferred_compilation():
        if form == "call":
            later = torch.compile(double, backend=backend, dynamic=dynamic)
        else:
            later = torch.compile(backend=backend, dynamic=dynamic)(double)
    assert (later.__name__, later.__doc__, later.__wrapped__) == ("double", "Twice as much.", double)
    assert not backend.graphs
    for rows in (3, 3, 4, 5):
        assert torch.equal(later(torch.ones(rows), plus=1.0), torch.full((rows,), 3.0))
    assert len(backend.graphs) == (1 if dynamic else 3)  # of any size, or one of each


def test_torch_is_asked_once_and_not_before_the_first_call(monkeypatch):
    asked = []

    def noted(function, **options):
        asked.append(options)
        return compile_now(function, **options)

    compile_now = torch.compile
    monkeypatch.setattr(torch, "compile", noted)
    with deferred_compilation():
        later = torch.compile(double, backend=Backend())
    assert not asked
    for _ in range(3):
        later(torch.ones(2))
    assert len(asked) == 1


def test_an_error_of_compiling_comes_with_each_call():
    """That is what bitsandbytes expects there: it goes on with the function as it is written."""
    with deferred_compilation():
        later = torch.compile(double, backend="no such compiler")
    for _ in range(2):
        with pytest.raises(Exception, match="no such compiler"):
            later(torch.ones(1))


def test_models_are_compiled_at_once():
    module = torch.nn.Linear(2, 2)
    with deferred_compilation():
        compiled = torch.compile(module, backend="eager")
    assert isinstance(compiled, torch._dynamo.OptimizedModule)
    assert compiled._orig_mod is module


def test_torch_compiles_as_ever_afterwards_also_after_an_error():
    ever = torch.compile
    with pytest.raises(ImportError), deferred_compilation():
        assert torch.compile is not ever
        raise ImportError
    assert torch.compile is ever


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was(enabled, monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    monkeypatch.delitem(sys.modules, "diffusers")  # as in a process that is new
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        frozen = gc.get_freeze_count()
        with pytest.raises(ImportError), quick_imports():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == enabled
        assert gc.get_freeze_count() <= frozen  # torch was here before: nothing of ours is kept for ever
    finally:
        (gc.enable if was else gc.disable)()


def test_what_a_new_process_imports_is_looked_through_no_more_but_nothing_else(tmp_path):
    """Small libraries under the names of the large ones: this is of what is done around their import."""
    many = "kept = [[] for _ in range(5000)]\n"
    (tmp_path / "torch.py").write_text(f"def compile(function): return function\n{many}", encoding="utf-8")
    (tmp_path / "bitsandbytes.py").write_text("import gc\nlooking = gc.isenabled()\n", encoding="utf-8")
    (tmp_path / "other.py").write_text(many, encoding="utf-8")
    code = (
        "import gc, sys\nfrom trainer.base.imports import quick_imports\nsys.path.insert(0, sys.argv[1])\n"
        "with quick_imports(): import bitsandbytes\n"
        "frozen = gc.get_freeze_count()\n"
        "with quick_imports(): import other\n"  # torch is here already, and with it what may become garbage
        "print(bitsandbytes.looking, frozen > 5000, gc.get_freeze_count() <= frozen, gc.isenabled())\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert (done.stdout.split(), done.stderr) == (["False", "True", "True", "True"], "")
