"""``fit`` on the driver: validation of the parameters, the rows, the job, and the trained model."""
