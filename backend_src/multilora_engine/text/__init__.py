"""Turns tokens into text.

tokenizer, token_table                     tokens to text and back; the bytes of each token
tokenizer_files                            reads a checkpoint's tokenizer
text_stream, spelled_text, automaton       a sequence's text, token by token, up to its stop words
chat_template                              whether a chat template compiles
chat_rendering, template_sandbox           fills in a chat template; those of adapters in processes with limits
chat_contents                              puts the contents of a chat into the form that its template takes
plain_specials                             keeps a client's text plain where it spells a special token
"""
