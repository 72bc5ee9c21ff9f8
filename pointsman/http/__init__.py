"""HTTP/1.1: parsing, server connections, client connections and event streams.

Enters: bytes and requests. Leaves: requests and bytes. The one rule: all HTTP of the package is in this room.
"""
