"""`multilora console`: a page to look at a server, its adapters and its answers, and the small backend of that page.

Needs the extra `openai`.

command, settings                          the command line
app, state                                 the application, and the object that every request to it finds
page, static/                              the files of the page: they run as they are
guard                                      takes only requests of the console's own page
routes, replies                            answers requests by asking the server with an `AsyncClient`
"""
