"""The engine that writes answers: many at once, by samplers of their own; the server, `generate` and `chat` use it."""
