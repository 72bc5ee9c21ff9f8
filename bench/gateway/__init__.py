"""`make bench-gateway`: Pointsman's gateway beside nginx, Envoy and the routers of vLLM and SGLang, in one run.

Enters: the peers that are installed. Leaves: tables of CPU time, latency and memory, with ratios. The one rule: whoever
is compared is measured in turns, the same traffic through each, proxies on one core, load and backend on the other.
"""
