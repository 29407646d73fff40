"""The YAML of axolotl (axolotl-ai-cloud/axolotl) as a run file."""
