"""The driver's side of a Ray cluster: its connection, and the gang of actors of a job."""
