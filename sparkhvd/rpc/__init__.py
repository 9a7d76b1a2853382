"""Authenticated frames over TCP, the messages in them, and a small server and client.

Used between the driver and the tasks of a job. Both sides prove that they know a shared secret before anything that the
other sent is parsed; messages are JSON and raw bytes, never pickles.
"""
