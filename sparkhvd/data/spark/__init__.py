"""Spark for the preparation of rows: jobs that can be cancelled, and the settings of file systems."""
