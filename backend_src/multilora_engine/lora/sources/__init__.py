"""The sources of adapters besides requests: directories, the Hugging Face hub, object stores, plug-ins."""
