"""The HTTP front door: an OpenAI-compatible API in front of the instances, written as a protocol machine.

Enters: bytes of clients, who are not trusted. Leaves: bytes of engines, as they are, or an error that says what to do.
The one rule: every request is answered exactly once, and no answer is cut in silence.

    ClientConnection ─ a request ─▶ Gateway ─ asks ─▶ Traffic (dispatchers)
          ▲                            │ sends
          └──── answer ──── Exchange ◀─┴─▶ UpstreamConnection ─▶ engine
"""
