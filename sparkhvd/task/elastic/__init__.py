"""Elastic jobs: a worker process, which may belong to several generations, and the Spark task that offers a slot."""
