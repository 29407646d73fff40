"""Engines that generate many answers concurrently, for the server, `generate` and `chat`.

`make` chooses an engine: `slots` on a CPU (with `slot_model`), `paged` on a GPU, or a sequential one. `write` turns its
tokens into text.
"""
