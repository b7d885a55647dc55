"""The presets at hand, those that arrive, and what each would cost on a card."""
