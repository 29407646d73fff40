"""Where `artel launch` submits jobs, one module each. `artel.registry.LAUNCHERS` lists them."""
