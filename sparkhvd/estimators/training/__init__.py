"""One rank's training: the worker, its hooks, checkpoints, the history and the logs."""
