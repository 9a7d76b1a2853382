"""One machine: its ranks without Spark, its devices, its versions, and its examination by the preflight."""
