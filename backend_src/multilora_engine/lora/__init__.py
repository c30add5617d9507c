"""Adapters: the wire format, the three tiers, and the door to them, `LoRAManager`.

format, layout, checkpoint_layout          wire tensors (`lora_weights`, `lora_config`) checked and packed into pages
manager, inventory, names                  the door; questions that change nothing; names and task ids
adapter_state, cached_adapter              the states of a version of an adapter, and all steps between them
admission, memory_tiers, eviction_order    how an adapter gets its pages, and which adapters leave for it
host_tier, device_tier, disk_tier          the tiers
  page_pool, free_pages, page_copies       divide memory into pages, and fill them
  disk_traffic, adapter_file               reads and writes of files
  table_rows, idle_adapters                the device's tables, and its adapters that no sequence uses
remote, sources/, preload                  adapters that come from elsewhere
life_cycle, residency                      records for operators
  adapter_events, event_log                the latest events of adapters
"""
