"""``fit`` on the driver: it validates parameters, prepares rows, runs the job and returns the trained model."""
