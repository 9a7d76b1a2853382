"""What runs beside the Spark driver: it counts slots, launches a job and collects its results."""
