"""Adapters: the wire format, the three tiers, and the door to them, `LoRAManager`.

format, layout                             wire tensors (`lora_weights`, `lora_config`) checked and packed into pages
manager, inventory, names                  the door; questions that change nothing; names and task ids
adapter_state, cached_adapter              the states of a version of an adapter, and all steps between them
admission, memory_tiers, eviction_order    how an adapter gets its pages, and which adapters leave for it
host_tier, device_tier, disk_tier          the tiers; `page_pool` and `free_pages` divide memory, `page_copies` fill it
  disk_traffic, adapter_file               reads and writes of files
  table_rows, idle_adapters                the device's tables, and its adapters that no sequence uses
remote, sources/, preload                  adapters that come from elsewhere
life_cycle, event_log, residency           records for operators
"""
