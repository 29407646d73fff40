"""What is done to one text by itself: rules, main text of pages, quality, language."""
