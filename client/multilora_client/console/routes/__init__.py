"""The requests of the page, by topic.

adapters, uploads                          the adapters of the server; new ones from files
asking                                     one question to several adapters, side by side
live                                       figures that change, and figures that do not
"""
