"""Building, loading and saving Hugging Face models: any architecture, unchanged in and out.

Import from the files: preparing text needs a few of them, and importing PyTorch takes seconds.
"""
