"""Forecasts: the memory timeline and the seconds of a run, from its traces and a device."""
