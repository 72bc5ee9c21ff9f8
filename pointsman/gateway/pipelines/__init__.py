"""Requests to applications: the gateway schedules every step of a graph like any other request.

Enters: requests for `/APP`, and calls that replicas make through handles. Leaves: the answers, and a record of every
step. The one rule: user code never runs here, and values that nodes pass to each other are not decoded.

    applications   the applications, their pages and input schemas, and calls of their replicas
    prepared       the steps of an application, ready to be sent
    request        one request through the steps
    results        its values so far, the answer made from them, the sinks that receive it, and shared memory
    step_call      one step in flight, to a replica or a model
    records        the outcome of each request, step by step, also as OpenTelemetry traces
"""
