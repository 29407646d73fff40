"""The YAML of impruver (EvilFreelancer/impruver) as a run file."""
