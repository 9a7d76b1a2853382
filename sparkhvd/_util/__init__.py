"""Small helpers that any layer may use: addresses, threads, file locks, tracebacks, suggestions."""
