"""Authenticated frames over TCP, the messages in them, and a small server and client.

Used between the driver and the tasks of a job. Both sides prove that they know a shared secret before either parses a
message. Messages are JSON and raw bytes, never pickles.
"""
