"""The worker process of one rank: how a task starts it, what it runs, and where its output goes."""
