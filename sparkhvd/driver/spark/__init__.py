"""The Spark side of launching: slots, resources, the barrier stage and the causes of failed jobs."""
