"""The HTTP front door: an OpenAI-compatible API in front of the instances.

Enters: requests of clients, who are not trusted. Leaves: responses of engines, as they are, or an error that says what
to do. The one rule: every request is answered exactly once, and no answer is cut off silently.

    GatewayConnection ─ request ─▶ Gateway ─ ModelRequest ─▶ dispatchers
            ▲                                                    │ Send
            └───────── answer ───── ModelRequest ◀─ Upstream ◀───┘
"""
