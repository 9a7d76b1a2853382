"""From a DataFrame to rows that ranks can read: select, split, write Parquet, or send them directly."""
