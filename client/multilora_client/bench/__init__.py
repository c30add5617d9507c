"""Load on a running server: who asks what and when (workload), asking it (load), and what came of it (report, plot)."""
