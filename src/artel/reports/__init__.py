"""Reports on runs: in the terminal, as a page, live in the browser, and as a model card."""
