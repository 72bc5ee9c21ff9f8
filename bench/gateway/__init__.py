"""`make bench-gateway`: Pointsman's gateway beside nginx, Envoy and the routers of vLLM and SGLang, in one run.

Enters: the peers that are installed. Leaves: tables of CPU time, latency and memory, with ratios. The one rule: all
proxies are measured in turn with the same traffic, on one core; the load generator and the backend run on the other.
"""
