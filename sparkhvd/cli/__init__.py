"""The command line: ``sparkhvdrun``, ``sparkhvd doctor``, and the flags and files that configure them."""
