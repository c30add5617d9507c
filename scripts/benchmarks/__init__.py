"""Times and rates, beside what the machine allows."""
