"""`multilora bench`: load on a running server.

command                                    the command line
workload                                   the requests, their targets and their times
load                                       sends them, and notes when each piece of an answer came
report, plot                               percentiles, the knee, answers that differ; a picture
"""
