"""What goes wrong while training: bad steps, memory that runs out, hangs."""
