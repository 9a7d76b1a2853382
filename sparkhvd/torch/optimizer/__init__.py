"""``DistributedOptimizer``: gradients that are averaged while the backward pass runs."""
