"""Traces and a device give a timeline of memory and seconds."""
