"""`multilora openai`: OpenAI's HTTP interface in front of a multilora server. Needs the extra `openai`.

`schemas` says which requests are understood, `asking.py` puts their questions to the server, `replies` is what answers
look like, `tools` knows how models call functions, `catalogue.py` what a model name means and who may use it; `routes`
and `app.py` tie them to an AsyncClient, `command.py` is the command line.
"""
