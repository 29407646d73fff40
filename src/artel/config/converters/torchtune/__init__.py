"""The YAML of torchtune (pytorch/torchtune) as a run file."""
