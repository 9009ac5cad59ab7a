"""Inflated: decodes the bodies of requests that their clients have compressed."""

import asyncio
import zlib

from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

from servd.base.errors import InvalidRequest

PIECE = 256 * 1024  # bytes that are decoded at once, as that blocks the event loop
# Bytes by which a body may be larger than when it is decoded: padding, long names and small members
# cost turns of the loop, and no other limit counts them.
MAX_EXCESS = 64 * 1024
MEMBER = 1024  # bytes that a member of gzip counts as, besides its own
# The formats that zlib reads for each Content-Encoding, as its `wbits`.
FORMATS = {"gzip": 31, "x-gzip": 31, "deflate": zlib.MAX_WBITS}


class Inflated:
    """A body that is decoded piece by piece, so that its receiver can stop before a small body
    becomes a large one.
    """

    def __init__(self, coding: str, receive_part: Receive) -> None:
        self.coding = coding
        self.receive_part = receive_part
        self.undecoded = b""  # received, and not decoded yet
        self.num_received = self.num_decoded = 0  # bytes
        self.num_members = 0  # of gzip, that have ended
        self.has_begun = self.is_last = self.has_ended = False

    async def receive(self) -> Message:
        """Return the next part of the decoded body, then what follows it.

        Raises:
            HTTPException: 415, the coding is another one.
            InvalidRequest: the body is damaged or cut.
        """
        if self.has_ended:
            return await self.receive_part()
        if self.coding not in FORMATS:
            raise HTTPException(
                415,
                f"Content-Encoding must be gzip, deflate or identity, got {self.coding[:100]!r}",
                {"Accept-Encoding": "gzip, deflate, identity"},
            )
        if not self.undecoded and not self.is_last:
            message = await self.receive_part()
            if message["type"] != "http.request":
                return message
            self.undecoded = message.get("body", b"")
            self.num_received += len(self.undecoded)
            self.is_last = not message.get("more_body", False)
        piece = self._decode()
        self.num_decoded += len(piece)
        num_read = self.num_received - len(self.undecoded)
        if num_read + self.num_members * MEMBER > self.num_decoded + MAX_EXCESS:
            raise InvalidRequest(
                f"{num_read} bytes of the body, with {self.num_members} ends of {self.coding} data "
                f"within, decode to only {self.num_decoded}: compress it as a whole"
            )
        is_full = len(piece) == PIECE
        self.has_ended = self.is_last and not self.undecoded and not is_full
        if self.has_ended and self.has_begun and not self.decoder.eof:
            raise InvalidRequest(f"the body ends in the middle of its {self.coding} data")
        await asyncio.sleep(0)  # let others have their turns
        return {"type": "http.request", "body": piece, "more_body": not self.has_ended}

    def _decode(self) -> bytes:
        if not self.has_begun and self.coding != "deflate":
            self.undecoded = self.undecoded.lstrip(b"\0")  # padding
        if not self.has_begun and self.undecoded:
            self.has_begun = True
            # Some clients send `deflate` without the header that says so.
            is_raw = self.coding == "deflate" and self.undecoded[0] & 15 != zlib.DEFLATED
            self.decoder = zlib.decompressobj(-15 if is_raw else FORMATS[self.coding])
        elif not self.has_begun:
            return b""
        try:
            piece = self.decoder.decompress(self.undecoded, PIECE)
        except zlib.error as error:
            raise InvalidRequest(f"the body is not {self.coding} data: {error}") from None
        self.undecoded = self.decoder.unconsumed_tail
        if self.decoder.eof and self.coding != "deflate":  # another member may follow: RFC 1952
            self.undecoded = self.decoder.unused_data
            self.has_begun = False
            self.num_members += 1
        elif self.decoder.unused_data:
            raise InvalidRequest(f"the body goes on after the end of its {self.coding} data")
        return piece
