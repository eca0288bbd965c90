"""Finished runs side by side: groups of seeds, their scores and costs, and the paper's tables."""
