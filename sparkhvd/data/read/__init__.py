"""The reading side of a rank: the plan of an epoch, prefetching, decoding, shuffling and caches."""
