"""Guides: which tokens may come next in an answer that must have a form. `engine/guide_queue` queues the guides.

guided                                 compiles guides, and matches the tokens of an answer against one
thinking                               what a model thinks before an answer, which no guide holds for
guide_grammar                          the grammars of guides, and their limits
guide_sandbox, guide_sandbox_process   try a guide in a process of its own before the engine compiles it
"""
