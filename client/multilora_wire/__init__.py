"""Wire knowledge that client and engine share: sites of adapters, layouts, files. Imports no torch and no client."""
