"""Authenticated frames over TCP, the messages in them, and a small server and client.

The driver and the tasks of a job use it. Both sides prove that they know a shared secret before either parses a
message. Messages are JSON and raw bytes, never pickles.
"""
