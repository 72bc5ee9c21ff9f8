"""`make bench-scaling`: the cost of scaling policies on recorded load, and the share of requests that goes unserved."""
