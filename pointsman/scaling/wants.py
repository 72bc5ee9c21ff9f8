"""What was wanted of late: the least and the most within a delay, in as many notes as there are different numbers."""

import msgspec


class Note(msgspec.Struct):
    """A number that was wanted, and until when."""

    replicas: int
    until: float


class Stabilization(msgspec.Struct):
    """A want holds until the next one is said. Before the first one, what was there was wanted.

    `falling` answers for the most: whoever is followed by as many or more can never be the most again, and goes.
    `rising` answers for the least in the same way.
    """

    last: int | None = None
    falling: list[Note] = []
    rising: list[Note] = []

    def note(self, now: float, wanted: int, before: int) -> None:
        """So many are wanted now; `before` stands for the time before the first want."""
        last = before if self.last is None else self.last
        for notes in (self.falling, self.rising):
            for note in notes:
                note.until = min(note.until, now)  # a clock that was put back must not keep a note for ever
            if notes:
                notes[-1].until = now  # it is the last want, and held until now
            else:
                notes.append(Note(last, now))
        while self.falling and self.falling[-1].replicas <= wanted:
            self.falling.pop()
        while self.rising and self.rising[-1].replicas >= wanted:
            self.rising.pop()
        self.falling.append(Note(wanted, now))
        self.rising.append(Note(wanted, now))
        self.last = wanted

    def most(self, now: float, delay_s: float) -> int:
        """The most that was wanted at any moment of the delay, now included."""
        _forget(self.falling, now - delay_s)
        return self.falling[0].replicas

    def least(self, now: float, delay_s: float) -> int:
        """The least that was wanted at any moment of the delay, now included."""
        _forget(self.rising, now - delay_s)
        return self.rising[0].replicas


def _forget(notes: list[Note], before: float) -> None:
    """Leave out what ended by then; the last note is what holds now."""
    while len(notes) > 1 and notes[0].until <= before:
        notes.pop(0)
