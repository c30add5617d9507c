"""Adapters: the wire format, the three tiers, and their one writer, `LoRAManager`."""
