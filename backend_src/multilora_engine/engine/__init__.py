"""The engine: decides which sequence runs in which step, and makes answers of its tokens. One thread owns all of it.

engine                                     `Engine`: a step is admission, schedule, batch (execution/), choice, answers
build, base_model                          the parts of an engine, from its configuration
memory, available_memory                   how much memory each part gets
admission, new_sequences, parking          a request on its way to the scheduler; it may wait for its adapter here
  request_limits, queue_limits             checks before that
  live_requests                            the requests in the engine, and their deadlines
scheduler, step, skipped                   the sequences of the next step; `Scheduler.finish` frees a sequence's blocks
  fair_queue, waiting_line, fair_shares    the order of the waiting sequences, and which running one gives way
  pace, step_clock, step_cost              how much work a step may have, by measured times
  prompt_waits, host_work                  how long prompts wait; time that requests take of the engine's thread
sequence, block_table                      the state of a sequence
kv_cache, block_events                     the blocks of the KV cache, and news of the prefixes in it
answers, outputs, held_outputs             tokens on their way to a client
beam_search, beams                         several candidates for one answer
unpacked_weights, weight_info              codes of a quantised base kept as floats, too
engine_stats                               counts for operators
"""
