"""Optimizers, master weights and learning rate schedules."""
