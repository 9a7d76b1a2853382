"""The ways to start a job's ranks; they do not know each other."""
