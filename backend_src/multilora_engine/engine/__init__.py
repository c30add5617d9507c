"""The engine: decides which sequence runs in which step, and makes answers of its tokens. One thread owns all of it.

engine                                     `Engine`: a step is admission, schedule, batch (execution/), choice, answers
build, base_model                          the parts of an engine, from its configuration
memory                                     how much memory each part gets
admission                                  a request on its way to the scheduler; it may wait for its adapter here
  request_limits                           checks before that
guide_queue                                the sequences that wait for their guides, and the memory that guides may take
scheduler                                  the sequences of the next step; `Scheduler.finish` frees the blocks of one
  accounts                                 what each client has used, and the order of the waiting sequences by it
  pace, padded_times                       how much work a step may have, by measured times
kv_cache, block_events                     the blocks of the KV cache, and news of the prefixes in it
answers, outputs                           tokens on their way to a client
unpacked_weights                           codes of a quantised base kept as floats, too
engine_stats                               counts for operators
"""
