"""`make bench-scaling`: what scaling policies would have cost on recorded load, and what would have gone unserved."""
