"""The operations of a ``Communicator``: on numpy arrays, on raw memory, and on the calling thread."""
