"""Collectives on torch tensors, and the access of the core to the tensors' memory."""
