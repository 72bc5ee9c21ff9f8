"""Which replicas receive which user config, and when."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pointsman.control.desired import Address
from pointsman.runtimes.user_configs import UserConfigs
from tests.runtimes.local.planes import run
from tests.runtimes.local.processes import eventually


class Replica:
    """Remembers what it was told, and answers with a status."""

    def __init__(self) -> None:
        self.told: list[bytes] = []
        self.heads: list[bytes] = []
        self.status = 200

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        self.heads.append(head)
        self.told.append(await reader.readexactly(length))
        writer.write(b"HTTP/1.1 %d x\r\ncontent-length: 4\r\nconnection: close\r\n\r\noops" % self.status)
        writer.close()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Address]:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        async with server:
            yield Address("127.0.0.1", server.sockets[0].getsockname()[1], False)


def test_only_replicas_with_another_config_receive_it() -> None:
    async def story() -> None:
        replica, configs = Replica(), UserConfigs(lambda: "s3cret")
        async with replica.serving() as address:
            configs.configure({"a.n": {"x": 1}})
            configs.launched("a.n-1", "a.n")
            configs.admitted("a.n-1", "a.n", address)
            configs.admitted("a.other-1", "a.other", address)
            configs.configure({"a.n": {"x": 1}})
            configs.configure({"a.n": {"x": 2}})
            await eventually(lambda: replica.told == [b'{"x":2}'])
            assert replica.heads[0].startswith(b"POST /configure HTTP/1.1\r\n")
            assert b"x-pointsman-secret: s3cret\r\n" in replica.heads[0]
            configs.configure({})
            await eventually(lambda: replica.told[1:] == [b"null"])
            configs.forget("a.n-1")
            configs.configure({"a.n": 5})
            configs.admitted("a.n-2", "a.n", address)  # of an earlier plane: its config is unknown
            await eventually(lambda: replica.told[2:] == [b"5"])
            assert configs.problems() == []
            configs.close()

    run(story())


def test_a_change_during_a_request_is_sent_next() -> None:
    async def story() -> None:
        replica, configs = Replica(), UserConfigs(lambda: "")
        async with replica.serving() as address:
            configs.launched("a.n-1", "a.n")
            configs.admitted("a.n-1", "a.n", address)
            for number in range(5):
                configs.configure({"a.n": number})
            await eventually(lambda: replica.told[-1:] == [b"4"])
            assert len(replica.told) == 2
            configs.close()

    run(story())


def test_refusals_are_problems_and_unreachable_replicas_are_retried() -> None:
    async def story() -> None:
        replica, configs = Replica(), UserConfigs(lambda: "")
        replica.status = 500
        async with replica.serving() as address:
            configs.configure({"a.n": 1})
            configs.admitted("a.n-1", "a.n", address)
            await eventually(
                lambda: [str(one) for one in configs.problems()] == ["a.n-1 refused its user config: oops"]
            )
            problems = [one.as_dict() for one in configs.problems()]
            assert [one["code"] for one in problems] == ["user-config-refused"]
            assert configs.status_of("a.n") == {"user_config": {"awaited": 0, "problems": problems}}
            assert configs.status_of("a.other") == {}
            configs.retry()
            await asyncio.sleep(0)
            assert len(replica.told) == 1, "a refused config is not sent again"
        configs.configure({"a.n": 2})
        await eventually(lambda: configs.problems()[0].code == "user-config-not-sent")
        replica.status = 200
        server = await asyncio.start_server(replica._answer, "127.0.0.1", address.port)
        async with server:
            configs.retry()
            await eventually(lambda: replica.told[1:] == [b"2"])
            await eventually(lambda: configs.problems() == [])
            assert configs.status_of("a.n") == {}
        configs.close()

    run(story())
