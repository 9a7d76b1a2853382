"""Differences between systems, each described once: Horovod's names, Databricks, and the versions of Spark."""
