"""What runs inside a Spark task: it starts one worker process per rank, watches over it and reports its outcome."""
