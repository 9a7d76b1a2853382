"""The description of rows: columns and their types in Spark, Arrow and numpy, and the manifest of a dataset."""
