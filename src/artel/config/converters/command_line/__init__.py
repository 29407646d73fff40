"""Command lines of transformers' run_clm.py and run_mlm.py as run files."""
