"""`artel serve`: a model behind OpenAI's API.

`server` listens, `app` has the routes, `completions`, `chat`, `seq2seq` and `tasks` answer them; `served` is the model.
"""
