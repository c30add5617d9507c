"""`multilora openai`: OpenAI's HTTP interface in front of a multilora server. Needs the extra `openai`.

`schemas` defines the requests, `asking.py` puts their questions to the server, `replies` gives answers their shape,
`tools` knows how models call functions, `catalogue.py` knows the model names, their meanings and the keys that may use
them; `routes` and `app.py` tie them to an AsyncClient, `command.py` is the command line.
"""
