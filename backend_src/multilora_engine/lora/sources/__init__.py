"""The sources of adapters besides requests: directories, the Hugging Face hub, object stores, plug-ins.

source                                     the protocol of a source, its errors, and the files that are an adapter
directory, hub, object_store               the sources that are built in
registry                                   the sources of a configuration, plug-ins too
fetcher, packing                           asks the sources on threads of its own, and packs what they give
"""
