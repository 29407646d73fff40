"""From a configuration or a folder to a model with weights, and back to a folder."""
