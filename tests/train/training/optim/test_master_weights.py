"""Masters add up gradients in fp32, the guard sees what is not finite, clipping is torch's, the fp16 scale moves."""

import math

import pytest
import torch
from torch.nn import Parameter

from trainer.errors import RunError
from trainer.training.optim.master_weights import LossScaler, MasterWeights, clip, measure


def make_masters(dtype: torch.dtype, count: int = 3) -> MasterWeights:
    generator = torch.Generator().manual_seed(2)
    shapes = [(4, 6), (5,), (2, 3, 3, 3)]
    return MasterWeights(
        {f"w{i}": Parameter(torch.randn(shapes[i], generator=generator).to(dtype)) for i in range(count)}
    )


def give_gradients(masters: MasterWeights, seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for weight in masters.working.values():
        weight.grad = (scale * torch.randn(weight.shape, generator=generator)).to(weight.dtype)
    return {key: weight.grad for key, weight in masters.working.items()}


@pytest.mark.parametrize(
    ("working", "expected"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_gradients_add_up_in_the_masters_format(working: torch.dtype, expected: torch.dtype) -> None:
    masters = make_masters(working)
    sums = {key: torch.zeros(weight.shape, dtype=torch.float64) for key, weight in masters.working.items()}
    for seed in range(8):
        for key, gradient in give_gradients(masters, seed).items():
            sums[key] += gradient.double()
        masters.accumulate()
        assert all(weight.grad is None for weight in masters.working.values())
    for key, master in masters.masters.items():
        assert master.dtype == master.grad.dtype == expected
        torch.testing.assert_close(master.grad.double(), sums[key], rtol=1e-6, atol=1e-6)
    masters.zero_grad()
    assert masters.gradients() == []


@pytest.mark.parametrize("working", [torch.bfloat16, torch.float32])
def test_gradients_taken_over_together_have_the_same_bits(working: torch.dtype) -> None:
    """Also where a weight has no part in the first micro-batches."""
    masters = make_masters(working)
    wanted: dict[str, torch.Tensor] = {}
    for seed in range(4):
        gradients = give_gradients(masters, seed)
        if seed < 2:
            masters.working["w1"].grad = None
            del gradients["w1"]
        for key, gradient in gradients.items():
            wanted[key] = wanted[key] + gradient.float() if key in wanted else gradient.float()
        masters.accumulate()
        assert all(weight.grad is None for weight in masters.working.values())
    for key, master in masters.masters.items():
        assert master.grad.dtype == torch.float32
        assert torch.equal(master.grad, wanted[key])
    masters.zero_grad()
    masters.accumulate()
    assert masters.gradients() == []


def test_masters_do_not_share_memory_with_the_working_weights() -> None:
    masters = make_masters(torch.float32)
    masters.masters["w0"].data.add_(1.0)
    assert not torch.equal(masters.working["w0"], masters.masters["w0"])
    masters.refresh()
    assert torch.equal(masters.working["w0"], masters.masters["w0"])


def test_refresh_rounds_and_keeps_the_working_tensors() -> None:
    masters = make_masters(torch.bfloat16)
    places = {key: weight.data_ptr() for key, weight in masters.working.items()}
    for master in masters.masters.values():
        master.data.mul_(1.2345)
    masters.refresh()
    for key, weight in masters.working.items():
        assert weight.data_ptr() == places[key]
        assert torch.equal(weight, masters.masters[key].to(torch.bfloat16))


def test_a_weight_without_gradient_is_left_out() -> None:
    """Module dropout leaves layers out of a micro-batch."""
    masters = make_masters(torch.float32)
    give_gradients(masters, 1)
    masters.working["w1"].grad = None
    masters.accumulate()
    assert masters.masters["w1"].grad is None
    gradient = give_gradients(masters, 2)["w1"]
    masters.accumulate()
    assert torch.equal(masters.masters["w1"].grad, gradient)


def test_load_takes_all_or_nothing() -> None:
    masters = make_masters(torch.bfloat16)
    saved = {key: torch.randn_like(master) for key, master in masters.masters.items()}
    before = masters.masters["w0"].detach().clone()
    with pytest.raises(RunError, match=r"1 of them do not match this job's adapter, such as w2"):
        masters.load({key: saved[key] for key in ("w0", "w1")})
    with pytest.raises(RunError, match=r"1 of them do not match this job's adapter, such as w1"):
        masters.load({**saved, "w1": torch.zeros(7)})
    assert torch.equal(masters.masters["w0"], before)
    masters.load(saved)
    for key, tensor in saved.items():
        assert torch.equal(masters.masters[key], tensor)
        assert torch.equal(masters.working[key], tensor.to(torch.bfloat16))


@pytest.mark.parametrize("limit", [0.5, 1e3, 0.0])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_clipping_is_that_of_torch(limit: float, scale: float) -> None:
    masters = make_masters(torch.float32)
    reference = [Parameter(master.detach().clone()) for master in masters.masters.values()]
    for weight, gradient in zip(reference, give_gradients(masters, 3).values(), strict=True):
        weight.grad = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_(reference, limit or math.inf)

    give_gradients(masters, 3, scale)
    masters.accumulate()
    loss, measured = measure(torch.tensor(0.25), masters, scale).tolist()
    clip(masters, measured, limit, scale)

    assert loss == 0.25
    assert measured == pytest.approx(float(norm), rel=1e-6)
    for master, weight in zip(masters.masters.values(), reference, strict=True):
        torch.testing.assert_close(master.grad, weight.grad, rtol=2e-6, atol=0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_number_anywhere_is_seen(bad: float) -> None:
    masters = make_masters(torch.float16)
    give_gradients(masters, 4)
    masters.accumulate()
    assert all(map(math.isfinite, measure(torch.tensor(1.0), masters).tolist()))
    assert not math.isfinite(measure(torch.tensor(bad), masters).tolist()[0])
    give_gradients(masters, 5)
    masters.working["w2"].grad[1, 2, 0, 1] = bad
    masters.accumulate()
    loss, norm = measure(torch.tensor(1.0), masters).tolist()
    assert loss == 1.0
    assert not math.isfinite(norm)


def test_scale_halves_on_overflow_and_doubles_after_2000_good_steps() -> None:
    scaler = LossScaler()
    assert scaler.scale == 65536.0
    scaler.update(finite=False)
    assert scaler.scale == 32768.0
    for _ in range(1999):
        scaler.update(finite=True)
    assert scaler.scale == 32768.0
    resumed = LossScaler()
    resumed.load(scaler.state())
    resumed.update(finite=True)
    assert resumed.state() == {"scale": 65536.0, "good_steps": 0}
    for _ in range(1999):
        resumed.update(finite=True)
    resumed.update(finite=False)  # the row of good steps begins anew
    resumed.update(finite=True)
    assert resumed.state() == {"scale": 32768.0, "good_steps": 1}


def test_scale_does_not_fall_below_one() -> None:
    scaler = LossScaler(scale=2.0)
    assert scaler.may_back_off
    scaler.update(finite=False)
    assert scaler.scale == 1.0
    assert not scaler.may_back_off
    scaler.update(finite=False)
    assert scaler.scale == 1.0
