"""Texts that the Train page shows about forecasts and bases: bytes, times, phases, fits and verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from PySide6.QtCore import QCoreApplication, QLocale, QObject

from app.core.jobs.settings import title_of
from app.core.models.verdict import BaseDescription, BaseVerdict, Family, FoundBase, Tool
from app.core.planning.answer import AnsweredPlan, PlanAnswer
from app.qt.widgets import QT_TRANSLATE_NOOP
from app.qt.widgets import format_duration as format_duration
from app.qt.widgets import format_memory as format_memory
from trainer.errors import sentence_and_remedy
from trainer.protocol.forecast import ROUNDING, Peak, PhaseForecast
from trainer.protocol.plan import AdviceCode, MemoryAdvice, PlanEstimate, Remark

_GIB = 1 << 30

PHASES: Mapping[str, str] = {
    "cache_pictures": QT_TRANSLATE_NOOP("Forecast", "Encode images"),
    "cache_texts": QT_TRANSLATE_NOOP("Forecast", "Encode captions"),
    "load": QT_TRANSLATE_NOOP("Forecast", "Load the base"),
    "quantise": QT_TRANSLATE_NOOP("Forecast", "Load and quantize the base"),
    "first_step": QT_TRANSLATE_NOOP("Forecast", "First step"),
    "train": QT_TRANSLATE_NOOP("Forecast", "Training"),
    "validate": QT_TRANSLATE_NOOP("Forecast", "Validation"),
    "preview": QT_TRANSLATE_NOOP("Forecast", "Generate previews"),
    "checkpoint": QT_TRANSLATE_NOOP("Forecast", "Write checkpoints"),
    "save": QT_TRANSLATE_NOOP("Forecast", "Save the LoRA"),
}
KINDS: Mapping[str, str] = {
    "weights": QT_TRANSLATE_NOOP("Forecast", "Base weights"),
    "activations": QT_TRANSLATE_NOOP("Forecast", "Activations"),
    "adapter": QT_TRANSLATE_NOOP("Forecast", "LoRA"),
    "optimizer": QT_TRANSLATE_NOOP("Forecast", "Optimizer"),
    "gradients": QT_TRANSLATE_NOOP("Forecast", "Gradients"),
    "temporary": QT_TRANSLATE_NOOP("Forecast", "Temporary tensors"),
    "workspace": QT_TRANSLATE_NOOP("Forecast", "Workspaces"),
}
PARTS: Mapping[str, str] = {
    "down_blocks": QT_TRANSLATE_NOOP("Forecast", "UNet down block {number}"),
    "mid_block": QT_TRANSLATE_NOOP("Forecast", "UNet middle block"),
    "up_blocks": QT_TRANSLATE_NOOP("Forecast", "UNet up block {number}"),
    "unet": QT_TRANSLATE_NOOP("Forecast", "rest of the UNet"),
    "text_encoder": QT_TRANSLATE_NOOP("Forecast", "text encoder"),
    "text_encoder_2": QT_TRANSLATE_NOOP("Forecast", "second text encoder"),
    "vae": "VAE",
    "cublas": "cuBLAS",
    "": QT_TRANSLATE_NOOP("Forecast", "outside of the models"),
}
"""Parts of the models that hold memory, by module or kind of block."""
REMARKS: Mapping[str, str] = {
    "search.incomplete": QT_TRANSLATE_NOOP("Forecast", "A better fit may exist. Forecast again to search further."),
    "alternatives.incomplete": QT_TRANSLATE_NOOP(
        "Forecast", "Some plans are not computed yet. Forecast again to see them."
    ),
    "fit.experiment": QT_TRANSLATE_NOOP(
        "Forecast", "{key} is experimental: the forecast ignores it, so memory and time may differ."
    ),
    "base.assumed": QT_TRANSLATE_NOOP("Forecast", "The base is not on this PC, so {family} as published is assumed."),
    "dataset.unreadable": QT_TRANSLATE_NOOP("Forecast", "The images could not be read, so {images} are assumed."),
    "dataset.empty": QT_TRANSLATE_NOOP("Forecast", "The dataset has no image to train on, so {images} are assumed."),
    "dataset.assumed": QT_TRANSLATE_NOOP("Forecast", "Assumed: {images} and {prompts}."),
    "smaller.phase": QT_TRANSLATE_NOOP(
        "Forecast", "No plan at this precision needs much less memory: “{phase}” takes {bytes} in each plan."
    ),
    "smaller.none": QT_TRANSLATE_NOOP("Forecast", "No plan needs much less memory than this one."),
    "captions.lengths": QT_TRANSLATE_NOOP("Forecast", "Captions are padded to the length that each needs: {lengths}."),
    "text_encoders.stop": QT_TRANSLATE_NOOP(
        "Forecast",
        "After step {step}, when text encoders stop, training needs {bytes} less, and the run takes {duration} less.",
    ),
    "cache.shards": QT_TRANSLATE_NOOP(
        "Forecast",
        "The cache holds {epochs} ({limit}). {encoded} for later epochs are encoded as needed: {rounds}, {offloaded}.",
    ),
    "cache.parts": QT_TRANSLATE_NOOP(
        "Forecast",
        "The cache holds part of an epoch ({limit}). {encoded} are encoded as needed: {rounds}, {offloaded}.",
    ),
    "estimate.cpu": QT_TRANSLATE_NOOP("Forecast", "This is an estimate, which may be off by {error}."),
    "estimate.int8_products": QT_TRANSLATE_NOOP(
        "Forecast",
        "This estimate assumes int8 products in all linear layers; the run uses them only where they are faster.",
    ),
}
"""Sentence for each remark code in trainer.protocol.plan.REMARKS."""
ADVICE: Mapping[AdviceCode, str] = {
    "close": QT_TRANSLATE_NOOP("Forecast", "{missing} too large: close {programs} ({bytes})"),
    "close_some": QT_TRANSLATE_NOOP("Forecast", "{missing} too large: free {bytes}, for example by closing {programs}"),
    "free": QT_TRANSLATE_NOOP("Forecast", "{missing} too large: free {bytes}"),
    "larger_gpu": QT_TRANSLATE_NOOP("Forecast", "{missing} too large for this GPU"),
}
_LIMITS: Mapping[str, str] = {
    "disk": QT_TRANSLATE_NOOP("Forecast", "the cache limit of this job"),
    "listing": QT_TRANSLATE_NOOP("Forecast", "the limit for planning ahead"),
}
_ENCODED: Mapping[tuple[str, ...], str] = {
    ("images",): QT_TRANSLATE_NOOP("Forecast", "Images"),
    ("captions",): QT_TRANSLATE_NOOP("Forecast", "Captions"),
    ("images", "captions"): QT_TRANSLATE_NOOP("Forecast", "Images and captions"),
}
_OFFLOADED = QT_TRANSLATE_NOOP("Forecast", "with the model offloaded")
_BESIDE = QT_TRANSLATE_NOOP("Forecast", "with the model still loaded")
_FIRST_LENGTH = QT_TRANSLATE_NOOP("Forecast", "{count} of {total} up to {tokens} tokens")
_FURTHER_LENGTH = QT_TRANSLATE_NOOP("Forecast", "{count} up to {tokens} tokens")
FAMILIES: dict[Family, str] = {"sd15": "SD 1.5", "sdxl": "SDXL"}
"""Display names of the families; not translated."""
_VELOCITY = QT_TRANSLATE_NOOP("Bases", "predicts velocity (v)")
_UNDECIDED = QT_TRANSLATE_NOOP("Bases", "prediction type unknown: look it up and set Prediction")
_OWN_FOLDER = QT_TRANSLATE_NOOP("Bases", "your folder")
_CHOOSE = QT_TRANSLATE_NOOP("Bases", "The model that the LoRA will change.")
_LINK = QT_TRANSLATE_NOOP("Bases", "Downloaded when training starts; its type is known then.")
_HUB = QT_TRANSLATE_NOOP("Bases", "From the Hugging Face Hub. Downloaded when training starts.")
_HUB_HERE = QT_TRANSLATE_NOOP("Bases", "From the Hugging Face Hub. Already on this PC.")


class Counts(QObject):
    """Texts with plural forms. lupdate recognizes `%n` only in the methods of a QObject."""

    def at_a_time(self, count: int) -> str:  # noqa: D102
        return self.tr("Compute %n image(s) at a time", "", count)

    def at_once(self, count: int) -> str:  # noqa: D102
        return self.tr("%n image(s) at once", "", count)

    def one_by_one(self, count: int) -> str:  # noqa: D102
        return self.tr("%n image(s) one at a time", "", count)

    def checkpointed(self, count: int) -> str:  # noqa: D102
        return self.tr("%n block(s) with gradient checkpointing", "", count)

    def epochs(self, count: int) -> str:  # noqa: D102
        return self.tr("%n epoch(s)", "", count)

    def rounds(self, count: int) -> str:  # noqa: D102
        return self.tr("%n time(s)", "", count)

    def images(self, count: int) -> str:  # noqa: D102
        return self.tr("%n square image(s)", "", count)

    def prompts(self, count: int) -> str:  # noqa: D102
        return self.tr("%n preview prompt(s)", "", count)


def gibibytes(size: float) -> str:
    """Format bytes as a number of GiB, without the unit."""
    return QLocale().toString(size / _GIB, "f", 1)


def headline(answer: PlanAnswer, *, here: bool) -> str:
    """Return a forecast in words: time, device, memory and where it peaks; `here` is whether the GPU is this PC's."""
    if answer.on_cpu and answer.pick is not None:
        words = QCoreApplication.translate("Forecast", "About {time} on this PC's CPU, {needed} of main memory.")
        return words.format(
            time=format_duration(answer.pick.forecast.seconds), needed=format_memory(answer.pick.needed)
        )
    own = QCoreApplication.translate("Forecast", "your {gpu}")
    gpu = own.format(gpu=answer.gpu.name) if here else answer.gpu.name
    plan = answer.pick
    if plan is None:
        words = QCoreApplication.translate(
            "Forecast", "This does not fit on {gpu} with any settings: it needs {missing} more memory."
        )
        return words.format(gpu=gpu, missing=format_memory(answer.missing))
    words = QCoreApplication.translate(
        "Forecast", "About {time} on {gpu}. Uses {needed} of the {free} GiB that are free; {peak}."
    )
    time, needed, free = format_duration(plan.forecast.seconds), gibibytes(plan.needed), gibibytes(answer.gpu.free)
    return words.format(time=time, gpu=gpu, needed=needed, free=free, peak=peak(plan))


def estimate(found: PlanEstimate) -> str:
    """Return an estimate in words, marked as such, while the forecast itself is being computed."""
    likely = {
        True: QCoreApplication.translate("Forecast", "It will probably fit."),
        False: QCoreApplication.translate("Forecast", "It will probably not fit."),
        None: QCoreApplication.translate("Forecast", "Whether it fits is not known yet."),
    }[found.fits]
    words = QCoreApplication.translate(
        "Forecast", "Estimate from a similar recipe: about {time}, {needed} of {budget} GiB of GPU memory. {likely}"
    )
    needed, budget = gibibytes(found.reserved), gibibytes(found.budget)
    return words.format(time=format_duration(found.seconds), needed=needed, budget=budget, likely=likely)


def comparison(answer: PlanAnswer) -> str:
    """Return the forecast for another GPU in words, marked as a comparison."""
    words = QCoreApplication.translate("Forecast", "For comparison only (not used for training): {sentence}")
    return words.format(sentence=headline(answer, here=False))


def peak(plan: AnsweredPlan) -> str:
    """Return where memory peaks, such as "peak in the backward of the last up block"."""
    phase = plan.decisive
    if not phase.peaks:
        return QCoreApplication.translate("Forecast", "peak: {phase}").format(phase=phase_name(phase.phase))
    name = max(phase.peaks, key=lambda one: one.allocated).name.replace(" through ", " of ")
    if name.startswith(("forward", "backward", "VAE")):
        return QCoreApplication.translate("Forecast", "peak in the {place}").format(place=name)
    if name.startswith(("end", "the center")):
        return QCoreApplication.translate("Forecast", "peak at {place}").format(place=name)
    return QCoreApplication.translate("Forecast", "peak while {doing}").format(doing=name)


def phase_name(phase: str) -> str:
    """Return a phase's display name."""
    return QCoreApplication.translate("Forecast", PHASES.get(phase, phase))


def kind_name(kind: str) -> str:
    """Return the display name of a kind of memory."""
    return QCoreApplication.translate("Forecast", KINDS.get(kind, kind))


def part_name(module: str) -> str:
    """Return the display name of a part of the model: a UNet block such as "unet.up_blocks.0", or a model's name."""
    model, _, block = module.partition(".")
    if block:
        words = QCoreApplication.translate("Forecast", PARTS.get(block.rstrip(".0123456789"), block))
        place = block.rpartition(".")[2]
        return words.format(number=int(place) + 1 if place.isdecimal() else "")
    return QCoreApplication.translate("Forecast", PARTS.get(model, model))


def peak_name(phase: PhaseForecast, peak: Peak) -> str:
    """Return a peak's phase, name and size, such as "Training, backward through the middle block: 7.9 GiB"."""
    return f"{phase_name(phase.phase)}, {peak.name}: {format_memory(peak.allocated)}"


def fit(chosen: Mapping[str, Any], effective_batch: int) -> str:
    """Return a fit as a phrase, such as "8-bit base, 4 images in 2 parts, no gradient checkpointing"."""
    base = " ".join(filter(None, (base_precision(chosen), _streamed(chosen))))
    parts = [base, _batches(chosen.get("micro_batch") or 1, effective_batch), _checkpointed(chosen)]
    if chosen.get("preview_offload"):
        parts.append(QCoreApplication.translate("Forecast", "UNet offloaded while previews are decoded"))
    return ", ".join(parts)


def cost(plan: AnsweredPlan) -> str:
    """Return how much precision a plan loses, or "" if it loses none."""
    rounding = ROUNDING.get(plan.quality)
    return (
        QCoreApplication.translate("Forecast", "weights rounded by {share} on average").format(share=rounding)
        if rounding
        else ""
    )


def fallback(changes: Mapping[str, Any]) -> str:
    """Return a fallback step in words: what a run changes when memory runs out."""
    if "vae_tiling" in changes:
        return QCoreApplication.translate("Forecast", "Decode previews in tiles")
    if "preview_offload" in changes:
        return QCoreApplication.translate("Forecast", "Offload the UNet while previews are decoded")
    if "vae_dtype" in changes:
        return QCoreApplication.translate("Forecast", "Encode images in {dtype}").format(dtype=changes["vae_dtype"])
    if "vae_encode_tiling" in changes:
        return QCoreApplication.translate("Forecast", "Encode images in tiles")
    if "text_encoder_batch_size" in changes:
        return QCoreApplication.translate("Forecast", "Encode captions one at a time")
    if "micro_batch" in changes:
        return Counts().at_a_time(changes["micro_batch"])
    if "quantize" in changes:
        return QCoreApplication.translate("Forecast", "Quantize the base to {bits}").format(bits=changes["quantize"])
    words = _checkpointed(changes)
    return words[:1].upper() + words[1:]


def too_large(missing: int, advice: MemoryAdvice | None) -> str:
    """Return by how much a plan exceeds the available memory and what to do about it; "" if there is no advice."""
    if advice is None:
        return ""
    words = QCoreApplication.translate("Forecast", ADVICE[advice.code])
    programs = ", ".join(advice.programs)
    return words.format(missing=format_memory(missing), programs=programs, bytes=format_memory(advice.bytes))


def remark(found: Remark) -> str:
    """Return the sentence for a remark."""
    words = QCoreApplication.translate("Forecast", REMARKS[found.code])
    return words.format(**{name: _value(name, value) for name, value in found.values.items()})


def _value(name: str, value: Any) -> str:
    """Format one value of a remark."""
    match name:
        case "epochs" | "rounds" | "images" | "prompts":
            return str(getattr(Counts(), name)(value))
        case "bytes":
            return format_memory(value)
        case "step":
            return f"{value:,}"
        case "duration":
            return format_duration(value)
        case "error":
            return f"{value:.0%}"
        case "family":
            return str(FAMILIES[value])
        case "phase":
            return phase_name(value)
        case "key":
            return title_of(value)
        case "limit":
            return QCoreApplication.translate("Forecast", _LIMITS[value])
        case "encoded":
            return QCoreApplication.translate("Forecast", _ENCODED[tuple(value)])
        case "offloaded":
            return QCoreApplication.translate("Forecast", _OFFLOADED if value else _BESIDE)
        case "lengths":
            return _caption_lengths(value)
    raise ValueError(f"no words for the value {name!r} of a remark")


def _caption_lengths(found: Sequence[tuple[int, int]]) -> str:
    total = sum(count for _, count in found)
    pieces = (
        QCoreApplication.translate("Forecast", _FURTHER_LENGTH if place else _FIRST_LENGTH).format(
            tokens=tokens, count=QLocale().toString(count), total=QLocale().toString(total)
        )
        for place, (tokens, count) in enumerate(found)
    )
    return ", ".join(pieces)


def base_precision(chosen: Mapping[str, Any]) -> str:
    """Return the precision in which a fit keeps the base, such as "8-bit base"."""
    if chosen.get("quantize") in ("int8", "int8_products"):
        return QCoreApplication.translate("Forecast", "8-bit base")
    if chosen.get("quantize") == "nf4":
        return QCoreApplication.translate("Forecast", "4-bit base")
    return QCoreApplication.translate("Forecast", "{dtype} base").format(dtype=chosen.get("dtype", ""))


def _streamed(chosen: Mapping[str, Any]) -> str:
    """Return how much of the base a fit streams; "" if nothing."""
    amount = chosen.get("stream") or "none"
    if amount == "none":
        return ""
    if amount == "full":
        return QCoreApplication.translate("Forecast", "streamed from main memory")
    return QCoreApplication.translate("Forecast", "{count} blocks streamed").format(count=amount)


def _batches(size: int, effective_batch: int) -> str:
    if size >= effective_batch:
        return Counts().at_once(effective_batch)
    if size == 1:
        return Counts().one_by_one(effective_batch)
    parts = -(-effective_batch // size)
    return QCoreApplication.translate("Forecast", "{images} images in {parts} parts").format(
        images=effective_batch, parts=parts
    )


def _checkpointed(chosen: Mapping[str, Any]) -> str:
    blocks = chosen.get("gradient_checkpointing") or "none"
    if blocks == "none":
        return QCoreApplication.translate("Forecast", "no gradient checkpointing")
    if blocks == "full":
        return QCoreApplication.translate("Forecast", "gradient checkpointing in all blocks")
    return Counts().checkpointed(len(blocks))


def family_of(base: BaseDescription) -> str:
    """Return the family name for a base's badge, or "" if unknown."""
    return FAMILIES[base.family] if base.family else ""


def owner_of(tool: Tool) -> str:
    """Return the name of the tool that owns a folder, or "your folder" if no tool does."""
    return tool or _tr(_OWN_FOLDER)


def size_words(size: int) -> str:
    """Format bytes in readable units; "" if the size is unknown (0)."""
    return QLocale().formattedDataSize(size, 1, QLocale.DataSizeFormat.DataSizeSIFormat) if size else ""


def details(found: FoundBase) -> str:
    """Return the second line of a base's list item: its problem, or its owner, size, prediction and folder."""
    if found.description.problem:
        return found.description.problem
    parts = (owner_of(found.tool), size_words(found.bytes), _prediction(found.description), str(found.path.parent))
    return " · ".join(part for part in parts if part)


def verdict_words(verdict: BaseVerdict) -> str:
    """Return the text below the base field: the base's problem, where it comes from, or its size and prediction."""
    base = verdict.description
    if base.problem:
        return sentence_and_remedy(base.problem, base.remedy)
    if verdict.place == "link":
        return _tr(_LINK)
    if verdict.place == "hub":
        return _tr(_HUB_HERE if base.family else _HUB)
    if verdict.place == "nowhere":
        return _tr(_CHOOSE)
    return " · ".join(part for part in (size_words(verdict.bytes), _prediction(base)) if part)


def _prediction(base: BaseDescription) -> str:
    """Return in words what a base predicts, or that this is unknown; "" if it predicts noise, the usual case."""
    if base.velocity is None:
        return _tr(_UNDECIDED)
    return _tr(_VELOCITY) if base.velocity else ""


def _tr(text: str) -> str:
    return QCoreApplication.translate("Bases", text)
