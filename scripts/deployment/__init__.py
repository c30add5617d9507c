"""What docker/ describes, tried on this machine without a container engine."""
