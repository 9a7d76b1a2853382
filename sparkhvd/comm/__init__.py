"""The communicator of a rank: ``init()``, collectives, process sets, and what detects that a rank does not come.

Start with ``session`` (the communicator of this process) and ``communicator`` (its operations).
"""
