"""The attention kernel is settled when a run is frozen: the one that is really used, by what PyTorch itself records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.jobs import photographs, write_job
from tests.support.tiny import tiny_base, tiny_configs, tiny_models
from tests.train.training.run.test_run import Watcher, run_of
from trainer.config.load import load_job
from trainer.errors import JobError
from trainer.protocol import events
from trainer.training.device import device
from trainer.training.device.device import choose_attention_kernel, head_widths
from trainer.training.run.start import start

CPU = torch.device("cpu")


class Operations(TorchDispatchMode):
    """Sees what PyTorch runs in the phase "train", and remembers the attention among it."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.attentions: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if self.phase == "train" and "scaled_dot_product" in name:
            self.attentions.add(name)
        return func(*args, **(kwargs or {}))


def widths_of(model: torch.nn.Module) -> set[int]:
    """By the modules themselves."""
    diffusers = {one.inner_dim // one.heads for one in model.modules() if hasattr(one, "heads")}  # type: ignore[operator]
    return diffusers | {one.head_dim for one in model.modules() if hasattr(one, "head_dim")}  # type: ignore[misc]


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_the_widths_of_heads_by_the_configs_are_those_of_the_models(family: str) -> None:
    configs, models = tiny_configs(family), tiny_models(family)  # type: ignore[arg-type]
    texts = [name for name in configs if name.startswith("text_encoder")]
    found = {width for name in ("unet", *texts) for width in widths_of(models[name])}
    # A block without attention may have heads of its own count that nobody uses.
    assert found <= head_widths(configs["unet"], [configs[name] for name in texts])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_the_cpu_auto_is_flash(dtype: torch.dtype) -> None:
    assert choose_attention_kernel("auto", CPU, dtype, {8, 40, 160}) == "flash"
    assert choose_attention_kernel("math", CPU, dtype, {8}) == "math"
    with pytest.raises(JobError, match='"efficient": it has no kernel on cpu'):
        choose_attention_kernel("efficient", CPU, dtype, {8})


def test_auto_passes_over_a_kernel_that_one_width_does_not_suit(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch refuses a kernel by an error, which no CPU gives for a width: the width 256 stands for one."""
    attend = torch.nn.functional.scaled_dot_product_attention

    def refusing(query: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        if query.shape[-1] == 256 and torch.backends.cuda.flash_sdp_enabled():
            raise RuntimeError("No available kernel. Aborting execution.")
        return attend(query, *others)

    monkeypatch.setattr(device.F, "scaled_dot_product_attention", refusing)
    assert choose_attention_kernel("auto", CPU, torch.float32, {8, 256}) == "math"


def test_a_frozen_job_names_the_kernel_that_its_steps_run(tmp_path: Path) -> None:
    job = write_job(tmp_path, tiny_base("sd15", tmp_path / "bases"), photographs(tmp_path / "pictures", count=3))
    operations = Operations()

    def watch(event: events.Event) -> None:
        if isinstance(event, events.PhaseStarted):
            operations.phase = event.phase

    with operations:
        assert start(job, ["report.previews.prompts=[]", "recipe.steps=1", "recipe.layers=attention"], watch) == 0
    assert load_job(run_of(job).job).fit.attention == "flash"
    assert operations.attentions == {
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    }


def test_a_kernel_that_this_machine_lacks_is_refused_before_a_run_is_made(tmp_path: Path) -> None:
    job = write_job(tmp_path, tiny_base("sd15", tmp_path / "bases"), photographs(tmp_path / "pictures", count=3))
    with pytest.raises(JobError) as refused:
        start(job, ["fit.attention=efficient"], Watcher())
    assert refused.value.code == "job.attention"
    assert not (tmp_path / "runs").exists()
