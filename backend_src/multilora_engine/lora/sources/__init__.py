"""Where an adapter can come from besides a request: directories, the Hugging Face hub, object stores, plug-ins."""
