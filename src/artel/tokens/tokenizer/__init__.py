"""Tokenizers.

`loading.py` opens one, `train.py` trains one, `tokenizer.py` is the class, `fast_encoder.py` and `word_cache.py` encode
faster. `chat_template.py` renders conversations, with `template_*.py` for limits and tool calls.
"""
