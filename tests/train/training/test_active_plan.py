"""How a run falls back: what each fallback changes, which one is next, and what a checkpoint keeps of it."""

from __future__ import annotations

import json

import pytest

from trainer.config.fit import FallbackStep, FitConfig
from trainer.training.active_plan import ActivePlan, changes_of, implied_fallbacks

FIT = FitConfig(device="cuda:0", micro_batch=5, gradient_checkpointing="none", quantize="none", vae_tiling=True)


def test_the_implied_ladder_goes_from_exact_to_rounding_to_quantized() -> None:
    fit = FIT.replaced(allow_quantized=True)
    fallbacks = [fallback.model_dump(exclude_none=True) for fallback in implied_fallbacks(fit, FitConfig())]
    assert fallbacks == [
        {"exact": True, "vae_tiling": True},
        {"exact": True, "preview_offload": True},
        {"exact": True, "gradient_checkpointing": "full"},
        {"exact": False, "micro_batch": 3},
        {"exact": False, "micro_batch": 2},
        {"exact": False, "micro_batch": 1},
        {"exact": True, "stream": "full"},
        {"exact": False, "quantize": "int8"},
        {"exact": False, "quantize": "nf4"},
        {"exact": False, "vae_encode_tiling": True},
        {"exact": False, "text_encoder_batch_size": 1},
    ]
    assert not any(fallback.quantize for fallback in implied_fallbacks(FIT, FitConfig()))
    in_bf16 = FIT.replaced(dtype="bf16")  # where the base is in bf16, the GPU is known to compute in it
    assert [fallback.vae_dtype for fallback in implied_fallbacks(in_bf16, FitConfig()) if fallback.vae_dtype] == [
        "bf16"
    ]


@pytest.mark.parametrize(
    "written",
    [
        {"gradient_checkpointing": "none"},
        {"micro_batch": 5},
        {"stream": "none"},
        {"vae_tiling": True, "preview_offload": False},
        {"quantize": "none"},
        {"vae_encode_tiling": False, "text_encoder_batch_size": 8},
    ],
)
def test_no_rung_of_the_implied_ladder_changes_what_the_user_wrote(written: dict[str, object]) -> None:
    fit = FIT.replaced(allow_quantized=True)
    free = [fallback.model_dump(exclude_none=True) for fallback in implied_fallbacks(fit, FitConfig())]
    left = [
        fallback.model_dump(exclude_none=True) for fallback in implied_fallbacks(fit, FitConfig.model_validate(written))
    ]
    assert left == [fallback for fallback in free if not written.keys() & fallback.keys()] != free


def test_at_the_end_of_the_ladder_it_names_what_the_user_holds_fast() -> None:
    bound = ActivePlan(FIT.replaced(allow_quantized=True), ())
    assert bound.step_down(4, "train") is None
    assert bound.forbidden(4, "train") == {"gradient_checkpointing": "full", "micro_batch": 3, "stream": "full"}
    assert bound.forbidden(4, "preview") == {"preview_offload": True, "stream": "full"}
    assert bound.forbidden(4, "load") == {"stream": "full"}
    assert bound.forbidden(4, "cache_texts") == {"text_encoder_batch_size": 1}
    assert bound.forbidden(4, "cache_pictures") == {}, "a resume refuses another way to encode images"
    free = plan()
    while free.step_down(4, "train"):
        pass
    assert free.forbidden(4, "train") == {}


@pytest.mark.parametrize(
    ("present", "fallback", "changes"),
    [
        ({"micro_batch": 2}, {"micro_batch": 2}, {}),
        ({"micro_batch": 2}, {"micro_batch": 4}, {}),
        ({"micro_batch": 4}, {"micro_batch": 2}, {"micro_batch": 2}),
        ({"gradient_checkpointing": "full"}, {"gradient_checkpointing": ["mid_block"]}, {}),
        ({"gradient_checkpointing": ["mid_block"]}, {"gradient_checkpointing": "none"}, {}),
        (
            {"gradient_checkpointing": ["mid_block"]},
            {"gradient_checkpointing": "full"},
            {"gradient_checkpointing": "full"},
        ),
        ({"vae_tiling": True}, {"vae_tiling": True, "preview_offload": True}, {"preview_offload": True}),
        ({"vae_dtype": "bf16"}, {"vae_dtype": "bf16"}, {}),
        ({"vae_dtype": "fp32"}, {"vae_dtype": "bf16"}, {"vae_dtype": "bf16"}),
        ({"deterministic": True}, {"text_encoder_batch_size": 1}, {}),
        ({"stream": "full"}, {"stream": "full"}, {}),
        ({"stream": 10}, {"stream": "full"}, {"stream": "full"}),
        ({}, {"quantize": "int8"}, {}),
        ({"allow_quantized": True}, {"quantize": "int8"}, {"quantize": "int8"}),
        ({"allow_quantized": True, "quantize": "nf4"}, {"quantize": "int8"}, {}),
    ],
)
def test_a_rung_never_leads_back_up(
    present: dict[str, object], fallback: dict[str, object], changes: dict[str, object]
) -> None:
    fit = FitConfig.model_validate(present)
    assert changes_of(fit, FallbackStep.model_validate({"exact": False, **fallback})) == changes


def plan() -> ActivePlan:
    return ActivePlan(FIT, tuple(implied_fallbacks(FIT, FitConfig())))


def test_a_phase_takes_the_next_rung_that_helps_it() -> None:
    down = plan()
    for phase, expected in [
        ("preview", {"preview_offload": True}),
        ("train", {"gradient_checkpointing": "full"}),
        ("validate", {"micro_batch": 3}),
        ("train", {"micro_batch": 2}),
        ("cache_pictures", {"vae_encode_tiling": True}),
        ("cache_pictures", None),
        ("cache_texts", {"text_encoder_batch_size": 1}),
        ("cache_texts", None),
        ("load", {"stream": "full"}),
        ("load", None),
        ("preview", None),
    ]:
        taken = down.step_down(4, phase)  # type: ignore[arg-type]
        assert (taken and taken[1]) == expected
    assert down.at(3) == FIT
    assert down.at(4) == FIT.replaced(
        preview_offload=True,
        gradient_checkpointing="full",
        micro_batch=2,
        stream="full",
        vae_encode_tiling=True,
        text_encoder_batch_size=1,
    )


def test_a_rung_may_be_needed_earlier_when_steps_are_replayed() -> None:
    down = plan()
    down.step_down(8, "train")
    before = down.applied
    assert down.step_down(6, "train") is not None
    assert down.at(5) == FIT and down.at(6).gradient_checkpointing == "full" and len(down.applied) == 1
    assert before[0].step == 8, "a list that somebody compares with has changed"


def test_a_checkpoint_keeps_the_rungs() -> None:
    down, again = plan(), plan()
    for step in (2, 5):
        down.step_down(step, "train")
    again.load(json.loads(json.dumps({"fallbacks": down.state()})))
    assert [again.at(step) for step in range(7)] == [down.at(step) for step in range(7)]
    again.load({})  # of an older version
    assert again.at(9) == FIT
