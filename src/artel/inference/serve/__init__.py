"""`artel serve`: a model behind OpenAI's API.

`server` listens, and `app` has the routes. `completions`, `chat`, `seq2seq` and `tasks` compute the responses. `served`
is the model.
"""
