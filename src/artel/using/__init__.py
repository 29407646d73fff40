"""Using a trained model: generate, report."""
