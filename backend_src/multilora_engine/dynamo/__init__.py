"""The engine as a worker of NVIDIA Dynamo: its front and router in place of Triton's server.

Token ids come in and token ids go out; Dynamo's front tokenizes, and writes the text. The rest of the package imports
nothing from here, so that it also works where ai-dynamo is not installed.

main, options                              the command `multilora-dynamo`, and its options
worker                                     `DynamoWorker`: an engine process as Dynamo's runtime drives it
  requests                                 reads the requests of Dynamo's front
  answers                                  answers and errors as Dynamo's front reads them
  engine_calls, streams                    requests and questions to the engine of this worker, and outputs
  reports, residency_taints                load, known prefixes and adapters in memory, told to Dynamo's router
  updates                                  `/v1/loras` and other paths of the worker's system server
catalogue, adapters                        adapters come into the fleet and leave it; the ones this worker answers for
  cards                                    the facts about an adapter that a worker publishes
  fleet_uploads, page_store                uploads that the fleet knows, and their pages, for other workers
  fleet_aliases                            names that stand for adapters, the same at all workers and fronts
  fleet_calls                              answers the messages of fronts and of other workers
relay, relay_process                       a front of a fleet: takes the place of its engine process
  front_uploads, fleet_operations          adapters and operators' requests on their way to all workers
  fleet_connection, fleet_router           Dynamo's runtime, and its router
fleet_messages, workers, keyed_locks       messages between fronts and workers, their calls, locks by key
"""
