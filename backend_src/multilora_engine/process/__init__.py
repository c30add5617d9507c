"""The engine in a process of its own: messages, the server around the engine, the fronts' client, the supervisor.

front (a Triton stub)                          engine process
  EngineClient  --- DEALER, ipc, ROUTER ---      EngineServer: one thread owns socket and engine
  EngineProcess --- stdin, stdout, exit ---      main
"""
