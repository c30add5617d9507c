"""The engine: which sequence runs in which step, and what its tokens mean."""
