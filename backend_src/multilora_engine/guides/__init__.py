"""Guides: which tokens may come next in an answer that must have a form. The engine queues them (`engine/guide_queue`).

guided                                 compiles guides, and matches the tokens of an answer against one
guide_grammar                          the grammars of guides, and their limits
guide_sandbox, guide_sandbox_process   guides are tried in processes of their own before the engine compiles them
"""
