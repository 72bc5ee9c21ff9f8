"""The gRPC front door: one predict service for every application, the health service, and reflection.

Enters: calls of clients. Leaves: the answers of applications as JSON, or a status that says what to do. The one rule: a
call is a request like any other; keys, tenants, limits, deadlines and records are those of HTTP.

    predict.proto   the service, for clients
    server          the messages, the services, and the server
    response_sink   the client that waits for an answer, and the answer as messages
"""
