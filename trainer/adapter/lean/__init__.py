"""LoRA layers of our own under PEFT's names: fewer operations a step, and only what backward needs is kept.

`attach` puts them in where `SWITCHED_ON` says so or its caller does; PEFT's own layers stand there otherwise. Off until
the traces that forecasts ship with are made of steps with these layers; none of it was run on a card yet.
"""

SWITCHED_ON = False
"""Whether training uses these layers; the only place that says so."""
