"""Datasets that other programs wrote: Parquet files of Spark or pandas, and petastorm datasets."""
