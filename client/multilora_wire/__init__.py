"""Wire knowledge that client and engine share: sites of adapters, layouts, files. Imports no torch and no client.

Beside it messages, end_with_parent: errors' texts of a bounded length, processes that end with their parent.
"""
