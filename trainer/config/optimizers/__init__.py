"""The optimizers of a recipe: what each is, its arguments and what it needs."""
