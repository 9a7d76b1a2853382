"""The ranks of the ray launcher: the Ray actor of a rank, and the commands of a ``RayExecutor``."""
