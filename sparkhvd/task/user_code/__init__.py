"""The receiving side of ``driver.user_code``: the modules that a process can import, and pickles of all others."""
