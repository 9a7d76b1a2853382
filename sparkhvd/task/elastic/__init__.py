"""Elastic jobs: worker processes, which may belong to several generations, and the tasks and hosts that start them."""
