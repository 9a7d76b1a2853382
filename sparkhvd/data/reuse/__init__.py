"""Finds prepared rows again: what identifies them, who uses them, and when they may be removed."""
