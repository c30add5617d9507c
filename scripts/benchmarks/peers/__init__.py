"""Programs that answer the same prompts, each with one engine, each in an environment of its own."""
