"""Answers as OpenAI and vLLM shape them: whole, or as server-sent events that add up to the same.

reply                                      `Reply`: the parts that chats and completions share
  chat, completion                         their answers
responses, output_items                    the answer of /v1/responses, and its items while they come
events                                     server-sent events
logprobs, usage                            log-probs of tokens; numbers of tokens
"""
