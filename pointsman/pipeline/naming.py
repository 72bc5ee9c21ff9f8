"""What something is called: the variable that it is about to be assigned to."""

import dis
import sys
from types import FrameType

_STORES = frozenset({"STORE_NAME", "STORE_FAST", "STORE_GLOBAL", "STORE_DEREF"})


def assigned_name(callers: int = 1) -> str:
    """The variable that the result of the caller's caller is assigned to, as in m1 = Model.bind(1); empty: to none.

    `callers`: how many frames up the call stands whose result is assigned.
    """
    frame: FrameType | None = sys._getframe(callers + 1)
    if frame is None:
        return ""
    after = (one for one in dis.get_instructions(frame.f_code) if one.offset > frame.f_lasti)
    following = next(after, None)
    if following is None or following.opname not in _STORES:
        return ""
    name = str(following.argval)
    return "" if name.startswith("_") else name
