"""Load on a running server: requests and their times (workload), sending them (load), their results (report, plot)."""
