"""Runs in and out of other forms: another attention, the formats of other programs."""
