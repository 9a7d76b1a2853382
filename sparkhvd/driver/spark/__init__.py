"""What launching needs of Spark: slots, resources, the barrier stage and the reasons of failed jobs."""
