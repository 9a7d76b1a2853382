"""The receiving side of ``driver.user_code``: which modules a process can import, and pickles of the others."""
