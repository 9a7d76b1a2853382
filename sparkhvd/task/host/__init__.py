"""One machine: its ranks without Spark, its package versions, and its examination by the preflight."""
