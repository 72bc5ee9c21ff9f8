"""HTTP/1.1, the only implementation in the package.

Enters: bytes and requests. Leaves: requests and bytes. The one rule: nothing here knows models, tenants or pipelines.

    parser      requests read from bytes
    responses   heads and chunks of responses read from bytes
    server      connections of clients, and answers to them
    pool        connections to servers
    client      requests whose responses are awaited
    events      server-sent events
    outbox      writes collected per turn of the event loop
"""
