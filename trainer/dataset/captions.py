"""Turns a picture's captions into the text that one showing of it is trained with."""

from __future__ import annotations

import re

import numpy as np

from trainer.config.captions import CaptionConfig

# The innermost braces that hold a bar; replacing them from the inside out resolves nested wildcards too.
_WILDCARD = re.compile(r"\{([^{}|]*(?:\|[^{}|]*)+)\}")


def compose_caption(
    captions: tuple[str, ...], trigger: str, class_words: str, config: CaptionConfig, stream: np.random.Generator
) -> str:
    """Return one showing's text, a pure function of the arguments and of the state of the caption stream.

    The order is kohya's (sd-scripts `process_caption`): one of the alternatives (none: the class words), trigger
    first unless the text holds it, prefix and suffix, dropout of the whole text, wildcards, then tags kept, shuffled
    and dropped. A trigger that was put first counts as a kept tag whatever `keep_tokens` says, and a tag that holds
    the trigger is never dropped.
    """
    text = captions[int(stream.integers(len(captions)))] if len(captions) > 1 else "".join(captions)
    text = text.strip() or class_words
    head = "" if not trigger or holds_trigger(f"{config.prefix} {text}", trigger) else trigger
    if config.dropout and stream.random() < config.dropout:
        return ""
    start = _spaced(config.prefix, head)
    text = f"{start}{_joint(config) if head else ' '}{text}" if start and text else start or text
    text = _spaced(text, config.suffix)
    if config.wildcards:
        text = choose_wildcards(text, stream)
    keep = max(config.keep_tokens, len(_tags(start, config)) if head else 0)
    return _arrange(text, keep, trigger, config, stream)


def without_chance(config: CaptionConfig) -> CaptionConfig:
    """Return the settings with nothing shuffled or dropped; alternatives and wildcards are still chosen."""
    return config.model_copy(update={"dropout": 0.0, "tag_dropout": 0.0, "shuffle": False})


def holds_trigger(text: str, trigger: str) -> bool:
    """Return whether the trigger stands in the text as a whole word, in capitals or not (CLIP reads both alike)."""
    return re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", text, re.IGNORECASE) is not None


def choose_wildcards(text: str, stream: np.random.Generator) -> str:
    """Return the text with every {a|b|c} replaced by one of its parts, each as likely as the others."""
    while found := _WILDCARD.search(text):
        parts = found[1].split("|")
        text = text[: found.start()] + parts[int(stream.integers(len(parts)))] + text[found.end() :]
    return text


def _arrange(text: str, keep: int, trigger: str, config: CaptionConfig, stream: np.random.Generator) -> str:
    """Shuffle and drop the tags between the kept ones; a text that asks for neither stays as it was written."""
    marked = bool(config.keep_separator) and config.keep_separator in text
    if not (marked or config.shuffle or config.tag_dropout):
        return text
    if marked:
        front, middle, *rest = text.split(config.keep_separator, 2)
        first, loose, last = (_tags(part, config) for part in (front, middle, "".join(rest)))
    else:
        tags = _tags(text, config)
        first, loose, last = tags[:keep], tags[keep:], []
    if config.shuffle:
        loose = [loose[place] for place in stream.permutation(len(loose))]
    if config.tag_dropout:
        dropped = stream.random(len(loose)) < config.tag_dropout
        loose = [
            tag
            for tag, gone in zip(loose, dropped, strict=True)
            if not gone or (trigger and holds_trigger(tag, trigger))
        ]
    return _joint(config).join([*first, *loose, *last])


def _tags(text: str, config: CaptionConfig) -> list[str]:
    return [tag.strip() for tag in text.split(config.separator) if tag.strip()]


def _joint(config: CaptionConfig) -> str:
    """What is written between tags: the separator and a space, as all taggers do."""
    return config.separator.strip() + " "


def _spaced(first: str, second: str) -> str:
    return f"{first} {second}".strip() if first and second else first or second
