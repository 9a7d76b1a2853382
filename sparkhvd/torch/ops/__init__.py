"""Collectives on torch tensors, and the tensors' way to the core."""
