"""Elastic training on a rank: states, the loop that restarts the training function, and the sampler."""
