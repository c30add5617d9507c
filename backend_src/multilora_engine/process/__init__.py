"""The engine in a process of its own: messages, the server around the engine, the fronts' client, the supervisor.

front (a Triton stub)                          engine process
  EngineClient  --- DEALER, ipc, ROUTER ---      EngineServer: one thread owns socket and engine
  EngineProcess --- stdin, stdout, exit ---      main

client                                     `EngineClient`: calls of a front, and their listeners
supervisor                                 `EngineProcess`: the engine, started again and again (`keep_alive`)
main                                       the program of the engine process
liveness, paths                            signs of life, an end that loses no request, where the socket is
messages                                   the messages between fronts and engine, and outputs that wait
server, fronts                             `EngineServer`: receives, steps, sends
  routes                                   the front and the sender of each request; limits of API keys
operations, adapter_operator               carries out operators' requests, and answers them
telemetry                                  counts requests, and the adapters most asked for
"""
