"""Tools: how calls of functions are asked for, guided, and read from a model's text.

use                                        `ToolUse`: the functions that an answer may call, or has to
formats, prompt                            how models write calls; tools told to a model whose template cannot
guide                                      the JSON schema of an answer that calls functions
parser, json_span                          takes calls out of a text while it comes
reasoning                                  takes a model's thinking out of it
calls                                      the parts of an answer: reasoning, text, and calls
"""
