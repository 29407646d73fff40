"""Conversations as a chat template writes them.

`writer.py` turns them into ids and flags; `assistant_mask.py` and `frame.py` locate the assistant's turns;
`template_check.py` checks the result; `calls.py` compares tool calls that a model makes.
"""
