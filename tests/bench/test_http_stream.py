"""The client of the load generator: answers taken apart as they come, stamped when they come."""

import asyncio
from contextlib import suppress

import pytest

from delivery.bench.http_stream import Client, HttpError

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKS = b"5;x=y\r\nhello\r\n7\r\n, world\r\n0\r\nTrailer: 1\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKS
TO_END = b"HTTP/1.0 200 OK\r\n\r\nhello"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN
EMPTY = b"HTTP/1.1 204 No Content\r\n\r\n"


def serve(answer, work, **client):
    """Run `work(client)` against a server that answers every request by calling `answer(writer)`."""

    async def main():
        connections = []

        async def handle(reader, writer):
            connections.append(writer)
            try:
                while True:
                    head = await reader.readuntil(b"\r\n\r\n")
                    await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
                    if not await answer(writer):
                        break
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        asked = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", **client)
        try:
            return await work(asked), len(connections)
        finally:
            await asked.close()
            server.close()
            for writer in connections:
                writer.close()
                with suppress(ConnectionError):
                    await writer.wait_closed()

    return asyncio.run(main())


async def body_of(client):
    status, pieces = await client.request("POST", "/x", b"{}")
    return status, b"".join([data async for _, data in pieces])


@pytest.mark.parametrize(
    ("answer", "status", "body"),
    [
        (PLAIN, 200, b"hello"),
        (CHUNKED, 200, b"hello, world"),
        (TO_END, 200, b"hello"),
        (INTERIM, 200, b"hello"),
        (EMPTY, 204, b""),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_an_answer_may_be_cut_anywhere(answer, status, body, size):
    async def send(writer):
        for at in range(0, len(answer), size):
            writer.write(answer[at : at + size])
            await writer.drain()
            await asyncio.sleep(0)
        return answer is not TO_END

    async def twice(client):
        return [await body_of(client), await body_of(client)]

    answers, connections = serve(send, twice)
    assert answers == [(status, body)] * 2
    assert connections == (2 if answer is TO_END else 1)


def test_a_piece_is_stamped_when_it_came_not_when_somebody_looks():
    async def send(writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\na")
        await asyncio.sleep(0.05)
        writer.write(b"b")
        return True

    async def late(client):
        _, pieces = await client.request("POST", "/x", b"{}")
        await asyncio.sleep(0.1)
        return [at async for at, _ in pieces], client.clock()

    ((first, second), now), _ = serve(send, late)
    assert 0.04 < second - first < 0.09
    assert now - second > 0.09


def test_a_connection_is_ready_before_it_is_needed():
    async def send(writer):
        writer.write(PLAIN)
        return True

    async def prepared(client):
        client.prepare()
        client.prepare()
        await asyncio.sleep(0.05)
        return await body_of(client)

    assert serve(send, prepared) == ((200, b"hello"), 1)


def test_a_connection_that_the_server_closed_meanwhile_is_replaced():
    async def send(writer):
        writer.write(PLAIN)
        return False

    async def work(client):
        first = await body_of(client)
        await asyncio.sleep(0.05)
        return [first, await body_of(client)]

    assert serve(send, work) == ([(200, b"hello")] * 2, 2)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"SSH-2.0-x\r\n\r\n", "not an HTTP answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhel", "cut off"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "cut off"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000, "head is too long"),
    ],
)
def test_what_is_no_whole_answer_is_an_error(answer, words):
    async def send(writer):
        writer.write(answer)
        await writer.drain()
        return False

    with pytest.raises(HttpError, match=words):
        serve(send, body_of)


def test_a_server_that_never_ends_is_given_up():
    async def send(writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhel")
        await asyncio.sleep(0.3)
        return False

    with pytest.raises(HttpError, match=r"within 0\.1 s"):
        serve(send, body_of, timeout_s=0.1)
