"""Random tables of a job, made from the schema alone, so that new keys are tested automatically."""

from typing import Annotated, Any, Literal, get_args, get_origin

from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from trainer.config.recipe import RecipeConfig
from trainer.config.schema import Section, sections_in


def values(annotation: Any, constraints: list[Any]) -> st.SearchStrategy[Any]:
    """Return a strategy for a field's values, made from its annotation alone, so that new fields are covered."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extra = get_args(annotation)
        found = [item for info in extra if isinstance(info, FieldInfo) for item in info.metadata]
        return values(inner, [*constraints, *found])
    if origin is Literal:
        return st.sampled_from(get_args(annotation))
    if origin is tuple:
        least = limit(constraints, "min_length") or 0
        item = get_args(annotation)[0]
        return st.lists(values(item, []), min_size=least, max_size=max(least, 2)).map(tuple)
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return tables(annotation)
    if annotation in (bool, str, int, float):
        return plain(annotation, constraints)
    return st.one_of([values(part, constraints) for part in get_args(annotation) if part is not type(None)])


def plain(kind: type, constraints: list[Any]) -> st.SearchStrategy[Any]:
    if kind is bool:
        return st.booleans()
    if kind is str:
        pattern = limit(constraints, "pattern")
        if pattern is not None:
            return st.from_regex(pattern, fullmatch=True)
        odd = ["a\x7fb", '"quoted"', "C:\\new\\table", "zwei\nZeilen", "日本語", "#", "a\\u0041"]
        return st.text(min_size=limit(constraints, "min_length") or 0, max_size=30) | st.sampled_from(odd)
    low, high = limit(constraints, "ge"), limit(constraints, "le")
    above, below = limit(constraints, "gt"), limit(constraints, "lt")
    if kind is int:
        step = limit(constraints, "multiple_of") or 1
        return st.integers(-(-(low or 0) // step), (2**40 if high is None else high) // step).map(
            lambda value: value * step
        )
    return st.floats(
        low if low is not None else above,
        high if high is not None else below,
        exclude_min=above is not None,
        exclude_max=below is not None,
        allow_nan=False,
        allow_infinity=False,
    )


def limit(constraints: list[Any], name: str) -> Any:
    return next((getattr(item, name) for item in constraints if getattr(item, name, None) is not None), None)


def tables(section: type[Section]) -> st.SearchStrategy[dict[str, Any]]:
    required, optional = {}, {}
    for name, field in section.model_fields.items():
        wanted = required if field.is_required() or sections_in(field.annotation) or name == "name" else optional
        wanted[field.alias or name] = st.deferred(lambda field=field: values(field.annotation, list(field.metadata)))
    return st.fixed_dictionaries(required, optional={key: optional[key] for key in optional})


@st.composite
def recipes(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a [recipe] table that satisfies the rules between keys, which random values rarely do."""
    recipe = draw(tables(RecipeConfig))
    lengths = [key for key in ("steps", "epochs", "images_seen") if key in recipe]
    for key in lengths[1:]:
        del recipe[key]
    recipe["schedule"] = {
        key: value for key, value in recipe["schedule"].items() if key not in ("warmup", "decay", "step_rules")
    }
    if recipe["schedule"].get("kind") == "piecewise":
        recipe["schedule"]["step_rules"] = "1:0.5,0.1:0.75,0.01"
    recipe["objective"].pop("loss_mix", None)
    if recipe["optimizer"]["name"] == "other":
        recipe["optimizer"].update(optimizer="lamb", args={"eps": 1e-6})
    if recipe["optimizer"]["name"] in ("schedulefree", "adafactor"):
        recipe["schedule"].pop("kind", None)
        recipe["optimizer"].pop("warmup_init", None)
    for encoder in ("text_encoder", "text_encoder_2"):
        recipe[encoder].pop("stop_after", None)
    for key in ("timestep_bias_begin", "timestep_bias_end"):
        recipe["objective"].pop(key, None)
    for section, low, high in (("objective", "timestep_min", "timestep_max"), ("images", "bucket_min", "bucket_max")):
        if recipe[section].keys() >= {low, high}:
            recipe[section].update(zip((low, high), sorted((recipe[section][low], recipe[section][high])), strict=True))
    recipe["captions"].pop("token_warmup_step", None)
    for key in ("debiased_estimation", "p2_gamma"):
        recipe["objective"].pop(key, None)
    # Not every optimizer and adapter allows these.
    for key in ("lora_plus_ratio", "max_weight_norm", "ema_decay", "adapter"):
        recipe.pop(key, None)
    for block in recipe["blocks"] or ():
        block["rank"] = block.get("rank") or 3
        block.pop("rate_factor", None)
    return recipe
