"""One module for each kind of Store."""
