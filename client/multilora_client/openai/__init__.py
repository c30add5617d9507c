"""`multilora openai`: OpenAI's HTTP interface in front of a multilora server. Needs the extra `openai`.

`schemas.py` says which requests are understood, `replies.py` what answers look like, `catalogue.py` what a model name
means and who may use it, `app.py` ties them to an AsyncClient, `command.py` is the command line.
"""
