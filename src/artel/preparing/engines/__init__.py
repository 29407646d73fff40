"""Where the tasks of preparing text run: processes of this machine, Slurm, Ray."""
