"""Trained runs for other programs, and their models as runs of ours."""
