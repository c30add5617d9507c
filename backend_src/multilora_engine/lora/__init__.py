"""Adapters: the wire format, the three tiers, and `LoRAManager`, which decides what is in them.

format, layout, checkpoint_layout          wire tensors (`lora_weights`, `lora_config`) checked and packed into pages
inventory, names                           the adapters of all tiers, described; names, task ids, members of sets
versions                                   the versions of an adapter that a request or an operator accepts
adapter_state                              the states of a version of an adapter, and all steps between them
manager, memory_tiers                      `LoRAManager`: which adapters come into memory and leave it; their users
host_tier, device_tier, disk_tier          the tiers
  outer_tables                             those parts as a step wants them
  free_pages, page_copies                  divide memory into pages, and fill them
  disk_traffic, adapter_file               reads and writes of files
remote, sources/, preload                  adapters that come from elsewhere
folder_use                                 what an adapter's folder says about its use
adapter_sets                               adapters that are sums of others
aliases                                    names that stand for adapters by weight
life_cycle                                 records for operators
  adapter_events                           the latest events of adapters
"""
