"""The driver's side of a job: counting slots, launching the ranks and collecting their results."""
