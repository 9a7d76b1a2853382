"""The messages between the driver and the tasks of a job, with their server and client.

Messages travel in authenticated frames over TCP. Both sides prove that they know a shared secret before either parses
a message. A message consists of JSON and raw bytes, never of pickles.
"""
