"""How ranks find each other: the launch context, the rendezvous, addresses, and MPI."""
