"""Forecast a run's memory timeline and duration from its traces and a device."""
