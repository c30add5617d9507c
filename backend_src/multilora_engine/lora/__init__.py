"""Adapters: the wire format, the two tiers, and their one writer, `LoRAManager`."""
