"""Turns tokens into text.

tokenizer, token_table                     tokens to text and back; the bytes of each token
tokenizer_files                            reads a checkpoint's tokenizer
text_stream, spelled_text, automaton       a sequence's text, token by token, up to its stop words
chat_contents                              contents of chats in the form that the template takes
plain_specials                             text of clients that spells special tokens stays text
"""
