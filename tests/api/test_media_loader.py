"""MediaLoader, with a process that decodes real pictures for a stand-in of a model."""

import asyncio
import base64
import gc
import mmap
import os
import signal
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
import trustme

from servd.api.engine import limited_process, media_fetcher, media_loader
from servd.api.engine.media_fetcher import MediaFetcher, is_public
from servd.api.engine.media_loader import LoadedPicture, MediaLoader
from servd.api.text.prompt import Picture
from servd.base.errors import InvalidRequest, Overloaded, Unavailable
from servd.checkpoint.model_spec import FAKE_SPEC
from servd.checkpoint.multimodal_config import MultiModalSpec
from servd.config import Config, MultiModalConfig
from tests.image_processors import encode, hostile_pictures, photo
from tests.limits import WAIT_SECONDS

ROOT = Path(__file__).parents[2]
PROCESSORS = "tests.image_processors"
PICTURE = encode(photo(), "PNG")


@pytest.fixture
def make(monkeypatch) -> Callable[..., MediaLoader]:
    """Makes loaders with these options."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    loaders: list[MediaLoader] = []

    def start(
        fetcher: MediaFetcher | None = None, processor: str = "PixelProcessor", **options: object
    ) -> MediaLoader:
        config = msgspec.structs.replace(Config(), multimodal=MultiModalConfig(**options))
        family = MultiModalSpec(processor=f"{PROCESSORS}:{processor}", image_token_id=0)
        spec = msgspec.structs.replace(FAKE_SPEC, multimodal=family)
        loaders.append(MediaLoader(config, spec, fetcher))
        return loaders[-1]

    yield start
    for loader in loaders:
        loader.close()


def data_url(data: bytes = PICTURE) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


async def load(
    loader: MediaLoader, *urls: str | None, salt: str | None = None, owner: str = "a", **fields: str
) -> list[LoadedPicture]:
    pictures = [Picture(url, **fields) for url in urls]
    return await loader.load(pictures, salt, owner)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():
            await asyncio.sleep(0.01)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def processes_of(loader: MediaLoader) -> int:
    process = loader._process._process
    assert process is not None
    return process[0].process.pid


async def test_a_picture_becomes_tensors_in_sealed_memory(make):
    loader = make()
    image = photo(13, 7)
    [loaded, other] = await load(loader, data_url(encode(image, "PNG")), data_url(), detail="low")
    assert loaded.placeholder == "<image>" and loaded.text == "13x7 low"
    assert other.text == "40x30 low" and other.identifier != loaded.identifier
    assert len(loaded.identifier) == 32 and loaded.num_embeds == 1 and loaded.grid == (1, 1)
    assert loaded.decode_ns > 0 and loaded.process_ns > 0 and loaded.fetch_ns > 0
    with open(loaded.memory.path, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        tensors = {
            place.name: np.frombuffer(
                memory, place.dtype, int(np.prod(place.shape)), place.offset
            ).reshape(place.shape)
            for place in loaded.tensors
        }
        assert (tensors["pixel_values"] == np.asarray(image)).all()
        assert tensors["size"].tolist() == [13, 7]
    with pytest.raises(PermissionError):
        os.write(loaded.memory.file, b"a")
    with pytest.raises(PermissionError):
        os.ftruncate(loaded.memory.file, 0)


async def test_fifty_requests_for_a_picture_decode_it_once(make):
    loader = make()
    loads = [load(loader, data_url(), owner=str(i % 5)) for i in range(50)]
    answers = await asyncio.gather(*loads)
    assert len({answer.memory.path for [answer] in answers}) == 1
    assert len(loader.memories) == 1
    [again] = await load(loader, data_url())
    assert again.memory is answers[0][0].memory and again.decode_ns == again.process_ns == 0
    assert [answer.is_cached for [answer] in answers].count(False) == 1
    [salted] = await load(loader, data_url(), salt="b")
    assert salted.identifier != again.identifier and salted.memory is not again.memory
    assert loader.num_in_flight == 0


async def test_what_the_cache_keeps(make):
    loader = make(mm_processor_cache_gb=0)
    before = open_files()
    [loaded] = await load(loader, data_url())
    assert open_files() > before
    del loaded
    await until(lambda: not loader.memories)
    loader = make(mm_processor_cache_gb=30_000 / (1 << 30))  # two pictures
    urls = [data_url(encode(photo(40, 30, seed), "PNG")) for seed in range(3)]
    for url in urls:
        await load(loader, url)
    assert len(loader.memories) == 2
    [newer] = await load(loader, urls[1])
    [older] = await load(loader, urls[0])
    assert newer.is_cached and not older.is_cached


async def test_a_uuid_stands_for_what_its_owner_sent(make):
    loader = make()
    [sent] = await load(loader, data_url(), uuid="x")
    [again] = await load(loader, None, uuid="x")
    assert again.identifier == sent.identifier and again.memory is sent.memory
    [changed] = await load(loader, data_url(encode(photo(9, 9), "PNG")), uuid="x")
    assert changed.identifier != sent.identifier  # the content counts
    for fields in ({"owner": "b"}, {"salt": "s"}, {"detail": "low"}):
        with pytest.raises(InvalidRequest, match="send it again"):
            await load(loader, None, **{"uuid": "x", **fields})
    with pytest.raises(InvalidRequest, match="send it again"):
        await load(loader, None, uuid="y")


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text,
        lambda text: text.replace("+", "-").replace("/", "_"),
        lambda text: text.rstrip("="),
        lambda text: "\r\n".join(text[i : i + 76] for i in range(0, len(text), 76)),
        lambda text: f" {text}\n",
        lambda text: text.replace("+", "%2B").replace("/", "%2f").replace("=", "%3D"),
        lambda text: f"%20{text}%0d%0A",
    ],
)
def test_base64_as_clients_send_it(change):
    text = base64.b64encode(PICTURE).decode()
    assert "+" in text and "/" in text and "=" in text
    assert media_loader.decode_data_url(f"data:;base64,{change(text)}") == PICTURE
    assert media_loader.decode_data_url(f"DATA:text/html;a=b;BASE64,{change(text)}") == PICTURE


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("data:image/png;base64,a", "base64"),
        ("data:image/png;base64,€uro", "base64"),
        ("data:image/png;base64,????", "base64"),
        ("data:image/png;base64,%41%41%41%41", "base64"),
        ("data:image/png,abc", "base64"),
        ("data:image/png;base64", "data:image"),
        ("data:;base64," + "A" * (28 << 20), "20 MB"),
        ("http://images.example/a.png", "https:"),
        ("ftp://images.example/a.png", "https:"),
        ("https://images.example/a.png", "--allowed-media-domains"),
        ("file:///etc/passwd", "--allowed-local-media-path"),
        (base64.b64encode(PICTURE).decode(), "data:"),
        ("", "data:"),
        ("javascript:alert(1)", "data:"),
    ],
)
async def test_other_addresses_are_refused(make, url, word):
    loader = make()
    with pytest.raises(InvalidRequest, match=word) as error:
        await load(loader, url)
    assert error.value.param == "messages" and len(str(error.value)) < 300
    assert loader._process._process is None and loader.num_in_flight == 0


async def test_files_in_a_folder(make, tmp_path, monkeypatch):
    folder = tmp_path / "pictures"
    folder.mkdir()
    (folder / "a b.png").write_bytes(PICTURE)
    (tmp_path / "secret.png").write_bytes(PICTURE)
    (folder / "inner.png").symlink_to(folder / "a b.png")
    (folder / "outer.png").symlink_to(tmp_path / "secret.png")
    (folder / "up").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe.png")
    (folder / "large.png").write_bytes(bytes(media_loader.MAX_BYTES + 1))
    loader = make(allowed_local_media_path=str(folder))
    [loaded] = await load(loader, f"file://{folder}/a%20b.png")
    [linked] = await load(loader, f"file://localhost{folder}/inner.png")
    assert loaded.identifier == linked.identifier
    names = "../secret.png", "outer.png", "up/secret.png", "pipe.png", "missing.png", ".", "a%00"
    errors: set[str] = set()
    for name in (*names, "%2e%2e/secret.png", "..%2fsecret.png", "/../../../../etc/passwd"):
        with pytest.raises(InvalidRequest) as error:
            await load(loader, f"file://{folder}/{name}")
        errors.add(str(error.value))
    for url in ("file:///dev/zero", "file:///proc/self/environ", f"file://host{folder}/a%20b.png"):
        with pytest.raises(InvalidRequest) as error:
            await load(loader, url)
        errors.add(str(error.value))
    [text] = errors  # which says nothing of what there is
    assert str(folder) not in text
    with pytest.raises(InvalidRequest, match="20 MB"):
        await load(loader, f"file://{folder}/large.png")
    (folder / "file").write_bytes(PICTURE)
    monkeypatch.chdir(folder)
    with pytest.raises(InvalidRequest, match="must begin with data: or https:$"):
        await load(loader, "file")  # no address


async def test_hostile_pictures_end_neither_the_process_nor_open_anything(make, monkeypatch):
    monkeypatch.setenv("SERVD_API_KEY", "secret")
    loader = make(processor="WatchedProcessor", mm_processor_cache_gb=0)
    await load(loader, data_url())
    first = processes_of(loader)
    assert b"secret" not in Path(f"/proc/{first}/environ").read_bytes()
    for data, word in hostile_pictures().values():
        with pytest.raises(InvalidRequest, match=word) as error:
            await load(loader, data_url(data))
        assert "/" not in str(error.value).replace("JPEG, PNG", "")
    [loaded] = await load(loader, data_url())
    assert loaded.text == repr([[], [], None])  # no event, no torch
    assert processes_of(loader) == first
    [loaded] = await load(loader, data_url(), detail="high")
    events, attempts, _ = eval(loaded.text)
    assert attempts == 3 * ["24"] and len(events) == 2  # EMFILE; and the hook works


async def test_an_error_frees_its_picture_at_once(make):
    """Not when Python looks for circles of references, which takes a while: pictures are large."""
    loader = make()
    await load(loader, data_url())
    before = open_files()
    gc.disable()
    try:
        for number in range(3):
            loads = (load(loader, data_url(b"%d" % number)) for _ in range(3))
            errors = await asyncio.gather(*loads, return_exceptions=True)
            assert {type(error) for error in errors} == {InvalidRequest}
            del errors
        await until(lambda: open_files() == before)  # a thread may be about to drop its own
    finally:
        gc.enable()


async def test_a_picture_that_takes_too_long_ends_its_process_alone(make, monkeypatch):
    monkeypatch.setattr(media_loader, "TIME_LIMIT", 0.5)
    monkeypatch.setattr(limited_process, "BUSY_FACTOR", 1000)  # this machine may be busy
    loader = make(processor="WatchedProcessor")
    with pytest.raises(InvalidRequest, match="cannot be processed in"):
        await load(loader, data_url(), detail="low")
    monkeypatch.setattr(media_loader, "TIME_LIMIT", 60.0)
    await load(loader, data_url())
    os.kill(processes_of(loader), signal.SIGKILL)
    [loaded] = await load(loader, data_url(encode(photo(9, 9), "PNG")))
    assert loaded.num_embeds == 1 and loader.num_in_flight == 0


async def test_a_processor_that_cannot_start_is_an_error_of_the_request(make):
    loader = make(processor="Missing")
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="pictures are not available with this model"):
            await load(loader, data_url())


async def test_cancelled_requests_leave_nothing(make):
    loader = make(mm_processor_cache_gb=0)
    await load(loader, data_url())
    pid = processes_of(loader)
    os.kill(pid, signal.SIGSTOP)
    tasks = [asyncio.create_task(load(loader, data_url())) for _ in range(3)]
    await until(lambda: [*loader._num_waiting.values()] == [3])
    assert loader.num_in_flight == len(PICTURE)  # the others have dropped theirs
    for task in tasks[:2]:
        task.cancel()
    await until(lambda: [*loader._num_waiting.values()] == [1])
    other = asyncio.create_task(load(loader, data_url(), owner="b"))
    tasks[2].cancel()
    os.kill(pid, signal.SIGCONT)
    [loaded] = await other
    del loaded, other
    tasks = [asyncio.create_task(load(loader, data_url(), owner=str(i))) for i in range(30)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: not loader.memories)
    assert loader.num_in_flight == 0 and not loader._tasks


async def test_too_many_bytes_at_once_are_refused_until_others_end(make, monkeypatch):
    loader = make(mm_processor_cache_gb=0)
    await load(loader, data_url())
    monkeypatch.setattr(media_loader, "MAX_IN_FLIGHT", 20 * len(PICTURE))
    urls = [data_url(encode(photo(40, 30, seed), "PNG")) for seed in range(500)]
    answers = await asyncio.gather(*(load(loader, url) for url in urls), return_exceptions=True)
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    assert errors and {(type(error), error.status) for error in errors} == {(Unavailable, 503)}
    assert len(errors) < 500 and loader.num_in_flight == 0
    del answers
    await until(lambda: not loader.memories)
    loader.max_files = 1
    held = await load(loader, urls[0])
    with pytest.raises(Overloaded, match="retry"):
        await load(loader, urls[1])
    del held
    await until(lambda: not loader.memories)
    await load(loader, urls[1])


async def test_a_prompt_of_too_many_pictures_is_not_told_to_try_again(make, monkeypatch):
    loader = make()
    monkeypatch.setattr(media_loader, "MAX_IN_USE", 3 * 40 * 30 * 3 * 4)  # bytes, of 3 pictures
    urls = [data_url(encode(photo(40, 30, seed), "PNG")) for seed in range(6)]
    with pytest.raises(InvalidRequest, match=r"picture \d of the prompt: .* tensors take over"):
        await load(loader, *urls)


async def test_owners_take_turns(make):
    """A client with many pictures does not delay another's by all of them."""
    loader = make()
    await load(loader, data_url())
    pid = processes_of(loader)
    os.kill(pid, signal.SIGSTOP)
    order: list[str] = []

    async def load_as(owner: str, seed: int) -> None:
        await load(loader, data_url(encode(photo(20, 20, seed), "PNG")), owner=owner)
        order.append(owner)

    tasks = [asyncio.create_task(load_as("greedy", seed)) for seed in range(20)]
    await until(lambda: len(loader._tasks) == 20)
    tasks.append(asyncio.create_task(load_as("b", 50)))
    await until(lambda: "b" in loader._process.turns._waiting.values())
    os.kill(pid, signal.SIGCONT)
    await asyncio.gather(*tasks)
    assert order.index("b") < 15  # mostly 1: its thread may wait for a CPU


# Addresses


LOOPBACK = """
127.0.0.1 127.1 127.0.1 0 0.0.0.0 2130706433 017700000001 0x7f000001 0x7f.1 0177.0.0.1 127.0.0.1.
0x7f.0x0.0x0.0x1 127.00.00.01 127.127.127.127 localhost LOCALHOST localhost. localhost.localdomain
[::1] [::] [0:0:0:0:0:0:0:1] [::ffff:127.0.0.1] [::ffff:7f00:1] [0:0:0:0:0:ffff:7f00:1]
[::127.0.0.1] [64:ff9b::7f00:1] [2002:7f00:1::] [fe80::1%25lo] 127%2e0%2e0%2e1 %31%32%37.0.0.1
１２７.０.０.１ 127。0。0。1 ①②⑦.⓪.⓪.① images.example@127.0.0.1 127.0.0.1@images.example
user:pass@images.example images.example:443@127.0.0.1 127.0.0.1#@images.example
127.0.0.1\\@images.example images.example\\@127.0.0.1 127.0.0.1:443\\images.example
127.0.0.1%00.images.example 127.0.0.1%0d%0a 127.0.0.1&@images.example
""".split()
METADATA = """
169.254.169.254 2852039166 0xa9fea9fe 0251.0376.0251.0376 0xa9.254.0251.254 169.254.43518
[::ffff:169.254.169.254] [::ffff:a9fe:a9fe] [fd00:ec2::254] [64:ff9b::a9fe:a9fe] [2002:a9fe:a9fe::]
169.254.169.254. 169.254.170.2 100.100.100.200 168.63.129.16 192.0.0.192 metadata.google.internal
10.0.0.1 172.16.0.1 192.168.1.1 224.0.0.1 255.255.255.255 [ff02::1] [fec0::1] [fe80::1] 240.0.0.1
""".split()


async def test_no_spelling_of_a_private_address_is_fetched():
    """Neither by default nor if the operator allows the spelling. The system reads the numbers."""
    connected: list[str] = []
    names = {"localhost.localdomain": "127.0.0.1", "metadata.google.internal": "169.254.169.254"}

    async def resolve(host: str, port: int) -> list[str]:
        return await media_fetcher.resolve(names.get(host, host), port)

    async def connect(host: str, port: int) -> None:
        connected.append(host)
        raise ConnectionRefusedError

    assert len(LOOPBACK) >= 40
    context = ssl.create_default_context()
    for host in (*LOOPBACK, *METADATA):
        plain = host.lower().removesuffix(".")
        for domains in ([], ["images.example"], ["*.example", plain], [host]):
            fetcher = MediaFetcher(domains, resolve, context=context)
            fetcher.network.connect_tcp = connect
            with pytest.raises(InvalidRequest) as error:
                await fetcher.fetch(f"https://{host}/a.png", lambda num_bytes: None)
            if not domains:
                assert "example" not in str(error.value) or "user name" in str(error.value)
    assert connected == []


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("::ffff:93.184.216.34", False),  # IPv4 has its own form
        ("64:ff9b::5db8:d822", False),
        ("2001:db8::1", False),
        ("64:ff9b:1::5db8:d822", False),
        ("::ffff:10.0.0.1", False),
        ("2002:0a00:1::", False),
        ("fd00:ec2::254", False),
        ("100.64.0.1", False),
        ("198.18.0.1", False),
        ("168.63.129.16", False),
    ],
)
def test_which_addresses_are_public(address, expected):
    assert is_public(address) is expected


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("images.example", True),
        ("IMAGES.example.", True),
        ("a.cdn.example", True),
        ("a.b.cdn.example", True),
        ("cdn.example", False),
        ("evilcdn.example", False),
        ("images.example.evil.example", False),
        ("a.images.example", False),
    ],
)
def test_which_hosts_are_allowed(host, expected):
    fetcher = MediaFetcher(["Images.example", "*.cdn.example"], context=Mock())
    if expected:
        assert fetcher.check(f"https://{host}/a?b")[1] == host.lower().removesuffix(".")
    else:
        with pytest.raises(InvalidRequest, match=r"--allowed-media-domains"):
            fetcher.check(f"https://{host}/a?b")
    with pytest.raises(InvalidRequest, match="https:"):
        fetcher.check(f"http://{host}/")


class Site:
    """A web site on this machine, whose answers are bytes by path."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes] = {}
        self.requests: list[bytes] = []
        self.resolved: list[str] = []
        self.addresses: dict[str, list[list[str]]] = {}  # by host, for each lookup
        self.num_open = 0
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        try:
            request = await reader.readuntil(b"\r\n\r\n")
            self.requests.append(request)
            answer = self.answers[request.split()[1].decode()]
            writer.write(answer.removesuffix(b"..."))
            await writer.drain()
            while answer.endswith(b"...") and not writer.is_closing():  # an endless answer
                writer.write(b"x" if answer.endswith(b"slow...") else bytes(1 << 20))
                await writer.drain()
                await asyncio.sleep(0.01 if answer.endswith(b"slow...") else 0)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self.num_open -= 1
            writer.close()

    async def resolve(self, host: str, port: int) -> list[str]:
        self.resolved.append(host)
        lookups = self.addresses.get(host, [["127.0.0.1"]])
        return lookups.pop(0) if len(lookups) > 1 else lookups[0]

    def url(self, path: str, host: str = "images.example") -> str:
        return f"https://{host}:{self.port}{path}"

    def add(self, path: str, body: bytes, *headers: str, status: str = "200 OK") -> None:
        head = [f"HTTP/1.1 {status}", *headers]
        if not any("ransfer" in header or "ontent-Length" in header for header in headers):
            head.append(f"Content-Length: {len(body)}")
        self.answers[path] = "\r\n".join([*head, "\r\n"]).encode() + body


AUTHORITY = trustme.CA()


@asynccontextmanager
async def running_site(*hosts: str) -> AsyncIterator[tuple[Site, MediaFetcher]]:
    site = Site()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    AUTHORITY.issue_cert(*(hosts or ["images.example", "*.cdn.example"])).configure_cert(context)
    server = await asyncio.start_server(site.serve, "127.0.0.1", 0, ssl=context)
    site.port = server.sockets[0].getsockname()[1]
    trusting = ssl.create_default_context()
    AUTHORITY.configure_trust(trusting)

    def is_allowed(address: str) -> bool:
        return address == "127.0.0.1" or is_public(address)

    domains = ["images.example", "*.cdn.example"]
    yield site, MediaFetcher(domains, site.resolve, is_allowed, trusting)
    server.close()
    await until(lambda: site.num_open == 0)


async def test_a_picture_is_fetched_by_its_content(make):
    async with running_site() as (site, fetcher):
        loader = make(fetcher)
        site.add("/a%20b?x=%26&y=z", PICTURE, "Content-Type: text/html", "Set-Cookie: a=b")
        url = site.url("/a b?x=%26&y=z#fragment")
        [loaded, again, sent] = await load(loader, url, url, data_url())
        assert loaded.text == "40x30 auto" and loaded.fetch_ns > 0
        assert loaded.identifier == again.identifier == sent.identifier
        [request, _] = site.requests
        assert f"host: images.example:{site.port}".encode() in request.lower()
        assert b"cookie" not in request.lower() and b"identity" in request
        site.add("/chunks", b"5\r\n%b\r\n0\r\n\r\n" % PICTURE[:5], "Transfer-Encoding: chunked")
        assert await fetcher.fetch(site.url("/chunks"), lambda num_bytes: None) == PICTURE[:5]
        assert loader.num_in_flight == 0


async def test_a_name_is_resolved_once_for_a_connection():
    async with running_site() as (site, fetcher):
        site.add("/a", PICTURE)
        site.addresses["images.example"] = [["127.0.0.1"], ["10.0.0.1"]]
        assert await fetcher.fetch(site.url("/a"), lambda num_bytes: None) == PICTURE
        assert site.resolved == ["images.example"]
        with pytest.raises(InvalidRequest, match="not public"):
            await fetcher.fetch(site.url("/a"), lambda num_bytes: None)
        site.addresses["images.example"] = [["127.0.0.1", "169.254.169.254"]]
        with pytest.raises(InvalidRequest, match="not public"):
            await fetcher.fetch(site.url("/a"), lambda num_bytes: None)
        assert len(site.requests) == 1


async def test_the_certificate_is_of_the_name():
    async with running_site("other.example") as (site, fetcher):
        site.add("/a", PICTURE)
        with pytest.raises(InvalidRequest, match="cannot be reached"):
            await fetcher.fetch(site.url("/a"), lambda num_bytes: None)
        assert site.requests == []


async def test_redirects_are_checked():
    async with running_site() as (site, fetcher):

        async def fetch(path: str) -> bytes:
            return await fetcher.fetch(site.url(path), lambda num_bytes: None)

        def redirect(path: str, place: str) -> None:
            site.add(path, b"", f"Location: {place}", status="302 Found")

        site.add("/a", PICTURE)
        redirect("/1", "/a")
        redirect("/2", site.url("/1", "b.cdn.example"))
        redirect("/3", site.url("/2"))
        redirect("/4", "3")
        assert await fetch("/3") == PICTURE
        with pytest.raises(InvalidRequest, match="redirects"):
            await fetch("/4")
        redirect("/none", "")
        with pytest.raises(InvalidRequest, match="redirects"):
            await fetch("/none")
        site.addresses["private.cdn.example"] = [["10.0.0.1"]]
        for place, word in {
            f"http://images.example:{site.port}/a": "https:",
            "https://169.254.169.254/latest/meta-data": "--allowed-media-domains",
            f"https://127.0.0.1:{site.port}/a": "--allowed-media-domains",
            "https://private.cdn.example/a": "not public",
            "file:///etc/passwd": "https:",
            "//evil.example/a": "--allowed-media-domains",
            f"https://a:b@images.example:{site.port}/a": "user name",
        }.items():
            redirect("/bad", place)
            with pytest.raises(InvalidRequest, match=word):
                await fetch("/bad")


@pytest.mark.parametrize(
    ("head", "word"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n...", "20 MB"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9999999999\r\n\r\n...", "20 MB"),
        (b"HTTP/1.1 200 OK\r\n\r\nslow...", "within 0 s"),
        (b"HTTP/1.1 200 OK\r\nX-A: slow...", "within 0 s"),
        (b"HTTP/1.1 200 OK\r\nX-A: ...", "cannot be reached"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n...", "compressed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc", "cannot be reached"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + 9999 * b"1\r\na\r\n",
            "reached",
        ),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "answers 404"),
        (b"HTTP/1.1 206 Partial\r\n\r\n", "answers 206"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "cannot be reached"),
        (b"", "cannot be reached"),
    ],
)
async def test_slow_endless_and_broken_servers(monkeypatch, head, word):
    if b"slow" in head:
        monkeypatch.setattr(media_fetcher, "TIMEOUT", 0.3)
    async with running_site() as (site, fetcher):
        site.answers["/a"] = head
        counted: list[int] = []
        with pytest.raises(InvalidRequest, match=word):
            await fetcher.fetch(site.url("/a"), counted.append)
        assert sum(counted) <= media_fetcher.MAX_BYTES + (1 << 20)


async def test_what_is_fetched_counts_while_it_arrives(make, monkeypatch):
    monkeypatch.setattr(media_loader, "MAX_IN_FLIGHT", 3 << 20)
    async with running_site() as (site, fetcher):
        loader = make(fetcher)
        site.answers["/a"] = b"HTTP/1.1 200 OK\r\n\r\n..."
        with pytest.raises(Unavailable, match="retry"):
            await load(loader, site.url("/a"))
        assert loader.num_in_flight == 0
