"""Runs in a Store: what identifies one, who may train it, and whether it can be resumed."""
