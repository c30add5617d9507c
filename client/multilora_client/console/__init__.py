"""`multilora console`: a page to look at a server, its adapters and its answers, and the small backend of that page.

Needs the extra `openai`. `static/` is the page: plain files, which run as they are. app.py puts routes, guard and page
together; guard.py says which requests are taken; routes/ answer them by asking the server with an `AsyncClient`, as
every other client does; converting.py turns what was dropped into an adapter, in a process of its own.
"""
