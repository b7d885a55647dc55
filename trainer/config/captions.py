"""How captions are turned into what the model reads."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainer.config.model import Section

Share = Annotated[float, Field(ge=0.0, le=1.0)]


class CaptionConfig(Section):
    """Caption handling, in the order: prefix and suffix, dropout, wildcards, tags kept, shuffled and dropped."""

    prefix: str = ""
    """Text put before every caption."""
    suffix: str = ""
    """Text put after every caption."""
    separator: str = Field(default=",", min_length=1)
    """What stands between tags."""
    shuffle: bool = False
    """Whether tags change their order each time a picture is shown."""
    keep_tokens: int = Field(default=0, ge=0, le=100)
    """How many tags at the front keep their place and are never dropped (the trigger word counts as one)."""
    keep_separator: str = ""
    """A mark such as ||| : tags before it (and after a second one) keep their place; empty: none."""
    dropout: Share = 0.0
    """Chance that a picture is shown without its caption, which keeps prompts without the trigger free."""
    tag_dropout: Share = 0.0
    """Chance that each tag beyond the kept ones is left out."""
    wildcards: bool = False
    """Whether {a|b|c} in a caption means one of the three at each showing."""
