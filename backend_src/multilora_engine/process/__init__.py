"""The engine in a process of its own: messages, the server around the engine, the fronts' client, the supervisor.

front (a Triton stub)                          engine process
  EngineClient  --- DEALER, ipc, ROUTER ---      EngineServer: one thread owns socket and engine
  EngineProcess --- stdin, stdout, exit ---      main

client, connection, claims                 `EngineClient`: calls of a front, and their listeners
supervisor, backoff                        `EngineProcess`: starts the engine, and starts it again when it dies or hangs
main, start_report                         the program of the engine process, and its report to the supervisor
heartbeat, drain, paths                    signs of life, an end without lost requests, where the socket is
messages                                   the messages between fronts and engine
server, served_engine, fronts, outbox      `EngineServer`: receives, steps, sends
  routes, rates                            the front and the sender of each request; limits of API keys
  awaited_answers                          answers that wait for a file or a source
  block_watch                              news of the prefix cache
operations, adapter_operator, reports      operators' requests, carried out and answered
telemetry, usage                           counts of requests, and of the adapters most asked for
"""
