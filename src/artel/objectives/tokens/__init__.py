"""Labels of tokens: names in a text (named entity recognition), or a tag for each word (parts of speech)."""
