"""Times and rates, beside the limits of the machine."""
