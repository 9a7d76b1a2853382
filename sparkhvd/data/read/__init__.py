"""Reading on a rank: the plan of an epoch, prefetching, decoding, shuffling and caches."""
