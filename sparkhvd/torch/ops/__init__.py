"""Collectives on torch tensors, and the core's access to the memory of the tensors."""
