"""The default base model, and small models and adapters that programs make."""
