"""The gRPC front door: one predict service for every application, the health service, and reflection.

Enters: calls of clients. Leaves: the answers of applications as JSON, or a status that says what to do.
The one rule: a call is a request like any other; keys, tenants, limits, deadlines and records are those of HTTP.

    predict.proto   the service, for clients
    messages        the same, for us
    listener        where it listens
    server          what is served there
    service         a call on its way into an application
    audience        the client that waits for the answer
    pieces          an answer as messages
    statuses        what a failure is called in gRPC
    health          who is ready

The packages that it takes are loaded when a listener opens: who wants no gRPC needs none of them.
"""

from pointsman.gateway.grpc.listener import GrpcListener

__all__ = ["GrpcListener"]
