"""Detects a collective that does not end, and reports which rank the others wait for."""
