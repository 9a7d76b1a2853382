"""Prepares the rows of a DataFrame for the ranks: splits them, and writes Parquet or sends them directly."""
