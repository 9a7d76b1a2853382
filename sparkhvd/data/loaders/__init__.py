"""Batches as torch tensors and as a ``tf.data.Dataset``, and base classes for users' own loaders."""
