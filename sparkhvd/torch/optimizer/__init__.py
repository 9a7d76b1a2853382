"""``DistributedOptimizer``, which averages gradients while the backward pass runs."""
