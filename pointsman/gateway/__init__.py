"""The HTTP front door: an OpenAI-compatible API in front of the instances.

Enters: requests from clients, who are not trusted. Leaves: unchanged responses from engines, or an error that tells the
client what to do. The one rule: every request is answered exactly once, and no answer is cut off silently.

    GatewayConnection ─ request ─▶ Gateway ─ ModelRequest ─▶ dispatchers
            ▲                                                    │ Send
            └───────── answer ───── ModelRequest ◀─ Upstream ◀───┘
"""
