"""The communicator of a rank: ``init()``, collectives, process sets, and the stall detector.

Start with ``session`` (the communicator of this process) and ``communicator`` (its operations).
"""
