"""HTTP/1.1, the only implementation in the package.

Enters: bytes and requests. Leaves: requests and bytes. The one rule: nothing here depends on models, tenants or
pipelines.

    parser      requests read from bytes
    responses   heads, chunks and server-sent events of responses read from bytes
    server      connections from clients, and answers to them
    pool        connections to servers, and writes collected per turn of the event loop
    client      requests whose responses are awaited
"""
