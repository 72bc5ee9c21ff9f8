"""The gRPC front door: one predict service for every application, the health service, and reflection.

Enters: calls from clients. Leaves: answers from applications as JSON, or a status that tells the client what to do. The
one rule: a call is a request like any other. Keys, tenants, limits, deadlines and records are the same as for HTTP.

    predict.proto   the service, for clients
    server          the messages, the services, and the server
    response_sink   the client that waits for an answer, and the answer as messages
"""
