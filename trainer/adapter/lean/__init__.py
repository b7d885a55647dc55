"""LoRA layers of our own under PEFT's names: fewer operations a step, and only what backward needs is kept.

`attach` puts them in; where its caller says so, PEFT's own layers stand there instead. None of it ran on a card yet.
"""

SWITCHED_ON = True
"""Whether training uses these layers; the only place that says so."""
