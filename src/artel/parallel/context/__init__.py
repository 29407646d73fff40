"""Context parallelism: several processes share each sequence."""
