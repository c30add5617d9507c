"""The Triton side: what runs in the stubs of the model repository, and the command that starts the server."""
