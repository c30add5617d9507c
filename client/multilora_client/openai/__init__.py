"""`multilora openai`: OpenAI's HTTP interface in front of a multilora server. Needs the extra `openai`.

command, settings                          the command line
app, front                                 the application, and the objects that every request to it finds
routes, schemas                            the paths; the requests
questions, asking, concurrency             questions put to the server, side by side
replies, tools                             the shape of answers; calls of functions
catalogue                                  the model names, their meanings, and the keys that may use them
errors, failure_answers                    errors in OpenAI's shape
connections, body_limit                    limits of connections and of request bodies
metrics                                    counts of requests and tokens
serving                                    the parts that `multilora console` shares
"""
