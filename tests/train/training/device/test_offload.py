"""A UNet that waits in main memory comes back bit for bit, and what is drawn with it is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.tiny import tiny_base
from tests.train.dataset.test_cache import prepared, quiet
from trainer.base.source import open_base
from trainer.config.base import BaseConfig
from trainer.config.lr_schedule import Segment
from trainer.training.build import build_engine
from trainer.training.callbacks.preview import Previewer
from trainer.training.device.offload import empty_cache, offloaded


def bytes_held(model: nn.Module) -> int:
    return sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["none", "int8", "nf4"])
def test_weights_leave_and_come_back(tmp_path: Path, kind: Any) -> None:
    unet = open_base(BaseConfig(model=str(tiny_base("sdxl", tmp_path)))).load_unet(torch.float32, "cpu", kind)
    for parameter in unet.parameters():  # as on a card: in memory of torch's own, where reading gave the file's
        if not parameter.untyped_storage().resizable():
            parameter.data = parameter.data.clone()
    before = [parameter.detach().clone() for parameter in unet.parameters()]
    held = bytes_held(unet)
    with offloaded(unet):
        assert bytes_held(unet) == 0
    assert bytes_held(unet) == held
    assert all(torch.equal(old, new) for old, new in zip(before, unet.parameters(), strict=True))


def test_weights_come_back_although_something_failed_for_want_of_memory() -> None:
    model = nn.Linear(64, 64)
    before = model.weight.detach().clone()
    held: list[int] = []

    class Held:
        def __del__(self) -> None:
            held.append(bytes_held(model))

    def fails() -> None:
        kept = Held()
        raise torch.OutOfMemoryError(f"no room beside {kept}")

    with pytest.raises(torch.OutOfMemoryError), offloaded(model):
        fails()
    # What the failed function held was gone before the weights took their place again.
    assert held == [0]
    assert torch.equal(model.weight, before)


def test_a_preview_is_the_same_whether_the_unet_waits_outside(tmp_path: Path) -> None:
    job, _, parts = prepared(tmp_path)
    engine = build_engine(job, parts, [Segment(0, 6)], fresh=True)
    parts.cache.ensure_texts(["", job.report.previews.prompts[0].prompt], quiet)
    drawn = []
    for offload in (False, True):
        changed = job.replaced(fit=job.fit.replaced(preview_offload=offload))
        previewer = Previewer(changed, parts.source, parts.cache, tmp_path / str(offload))
        previewer.render_all(1, engine.models.unet, (), lambda *_: None, quiet)
        drawn.append(previewer.path(1, 0).read_bytes())
    assert drawn[0] == drawn[1]


def test_on_the_cpu_there_is_nothing_to_release() -> None:
    empty_cache(torch.device("cpu"))


def test_each_preview_is_reported_with_its_own_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, _, parts = prepared(tmp_path)
    first = job.report.previews.prompts[0]
    prompts = (first, first.replaced(seed=2), first.replaced(seed=3))
    job = job.replaced(report=job.report.replaced(previews=job.report.previews.replaced(prompts=prompts)))
    engine = build_engine(job, parts, [Segment(0, 6)], fresh=True)
    parts.cache.ensure_texts(["", first.prompt], quiet)
    previewer = Previewer(job, parts.source, parts.cache, tmp_path)
    clock = [0.0]
    draw, decode = previewer._render, previewer._decode

    def timed(taken: float, work: Any, *given: Any) -> Any:
        clock[0] += taken
        return work(*given)

    monkeypatch.setattr("trainer.training.callbacks.preview.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(previewer, "_render", lambda prompt, *rest: timed(10.0 * prompt.seed, draw, prompt, *rest))
    monkeypatch.setattr(previewer, "_decode", lambda latents: timed(6.0, decode, latents))
    seconds: list[float] = []
    previewer.render_all(1, engine.models.unet, (), lambda _index, _file, taken: seconds.append(taken), quiet)
    assert seconds == [10.0 * prompt.seed + 2.0 for prompt in prompts]
