"""Differences from other systems, each described once: Horovod's names, and the paths and GPUs of Databricks."""
