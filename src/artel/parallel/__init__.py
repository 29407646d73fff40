"""How one global batch is run by one process or many."""
