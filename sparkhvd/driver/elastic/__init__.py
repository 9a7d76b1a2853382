"""Elastic jobs on the driver: which workers form the next generation, and the loop that carries it out."""
