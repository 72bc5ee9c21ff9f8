"""Requests through applications: every step of a graph is scheduled like any other request.

Enters: requests for `/APP`, and calls of replicas through handles. Leaves: their answers, and a record of every step.
The one rule: code of users never runs here, and what their nodes say to each other is passed on unread.

    applications   which there are, and where their pages are
    prepared       the steps of an application, ready to be sent
    passage        one request on its way through the steps
    results        what it has so far, and the answer made of it
    journal        what is noted of it
    sharing        its files in shared memory
    step_call      one step on its way to a replica
    audience       whoever waits for the answer
    model_calls    steps that are calls of models
    records        what became of each request, step by step
"""
