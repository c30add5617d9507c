"""The engine: decides which sequence runs in which step, and what its tokens mean. One thread owns all of it.

engine                                     `Engine`: a step is admission, schedule, batch (execution/), choice, answers
build, base_model, memory                  the parts of an engine, from its configuration
admission, new_sequences, parking          a request on its way to the scheduler; it may wait for its adapter here
  request_limits, queue_limits             checks before that
scheduler, fair_queue, fair_shares         the sequences of the next step; `Scheduler.finish` frees a sequence's means
pace, step_clock, step_cost, prompt_waits  how much work a step may have, by measured times; how long prompts wait
sequence, block_table, kv_cache            the state of a sequence, its blocks of the KV cache
answers, outputs, held_outputs             tokens on their way to a client
beam_search, beams                         several candidates for one answer
"""
