"""Start the processes of a run: with torchrun's machinery on this host, or as another launcher's environment says."""
