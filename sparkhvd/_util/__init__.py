"""Small helpers that any layer may use: addresses, threads, processes, registries, texts, imports of frameworks."""
