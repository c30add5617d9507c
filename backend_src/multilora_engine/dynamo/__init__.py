"""The engine as a worker of NVIDIA Dynamo: its front and router in place of Triton's server.

Token ids come in and token ids go out; Dynamo's front tokenizes, and writes the text. The rest of the package imports
nothing from here, so that it also works where ai-dynamo is not installed.
"""
