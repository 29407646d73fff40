"""The YAML of LLaMA-Factory (hiyouga/LLaMA-Factory) as a run file."""
