"""Attacks on a server and by a model's chat template: slow clients, foreign pages, prompts that cost much, templates
that loop or allocate."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from capibara.core.types import UserError
from capibara.data.chat import template_process
from capibara.data.chat.conversations import ChatJsonlSource, TrainOn, render_example
from capibara.data.chat.formats import Conversation
from capibara.data.chat.template import ChatTemplate, TemplateFails
from capibara.data.dataset import Dataset
from capibara.data.tokenizers.vocabulary import GUARD, ByteVocabulary, TokenizerJsonVocabulary
from capibara.inference.interactive import chat
from capibara.inference.sampling.sampling import Sampling
from capibara.inference.server import server
from capibara.inference.server.app import app_of
from capibara.inference.server.prometheus import ServingMetrics
from capibara.inference.server.service import bounds
from capibara.inference.server.service.http_errors import Refusal
from capibara.inference.server.service.service import Served, ServerConfig, Service
from capibara.inference.server.visitors import visitors_of

TALK = Conversation([{"role": "user", "content": "Hello"}])
TIME, MEMORY, DEEP = r"takes more than 1\.\d s: it loops", "needs more than 256 MiB of memory", "too deeply"

# Templates that Jinja's own sandbox lets through.
LOOPS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "numbers": "{{ 3 ** (10 ** 8) }}",
    "text without end": "{{ lipsum(n=10 ** 7) }}",
    "cycles": "{% set a = cycler(1, 2) %}" + "{% for i in range(99999) %}" * 3 + "{{ a.next() }}" + "{% endfor %}" * 3,
}
ALLOCATES = {
    "a product": "{{ 'a' * 10 ** 10 }}",
    "a list's product": "{{ ([1] * 10 ** 9) | length }}",
    "rjust": "{{ 'x'.rjust(10 ** 10) }}",
    "center": "{{ 'x' | center(10 ** 10) }}",
    "a width": "{{ '%1000000000d' | format(1) }}",
    "a width of %": "{{ '%999999999s' % 'x' }}",
    "a width of format": "{{ '{:>9999999999}'.format(1) }}",
    "doubled text": "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubled list": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "replace": "{{ ('a' * 10 ** 6).replace('a', 'b' * 10 ** 6) }}",
    "join": "{{ (['a' * 10 ** 6] * 10 ** 5) | join }}",
    "indent": "{{ ('x\n' * 10 ** 5) | indent(10 ** 4) }}",
    "tojson": "{{ {'a': 1} | tojson(indent=10 ** 9) }}",
    "batch": "{{ [1] | batch(10 ** 9, 0) | list }}",
    "output": "{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}",
    "folded when it is compiled": "{% if 'a' * 99999999999 %}{% endif %}",
}
BOTH = {"lists": "{{ range(10) | slice(10 ** 9) | list }}"}  # a fast machine meets the bound on memory first
NESTED = {
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "a sum": "{{ 1" + "+1" * 60_000 + " }}",
    "filters": "{{ 'a'" + "|upper" * 30_000 + " }}",
}
QUICK = ("nested loops", "a product", "rjust", "doubled text", "a width", "output", "recursion", "parentheses")
HOSTILE = [
    pytest.param(template, said, id=name, marks=[] if name in QUICK else pytest.mark.heavy)
    for templates, said in ((LOOPS, TIME), (ALLOCATES, MEMORY), (BOTH, f"{TIME}|{MEMORY}"), (NESTED, DEEP))
    for name, template in templates.items()
]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    import tokenizers
    from tokenizers import models

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.add_special_tokens(["<s>", "</s>"])
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return str(folder)


def render(folder: str, template: str) -> str:
    return ChatTemplate(tokenizer=folder, template=template).render(TALK, "a.jsonl:1").text


# Templates.


@pytest.mark.fault(62)
@pytest.mark.parametrize("template, said", HOSTILE)
def test_a_template_that_loops_or_allocates_is_ended(tokenizer_folder, template, said):
    began_s = time.monotonic()
    with pytest.raises(UserError, match=said) as error:
        render(tokenizer_folder, template)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400 and "ChatTemplate.template" in str(error.value)
    assert time.monotonic() - began_s < 10
    assert render(tokenizer_folder, "{{ messages[0].content }}") == "Hello"


HELD = """
import signal
from capibara.data.chat import template_process
from capibara.data.chat.template_process import Template, TemplateError

def ended():
    template_process._process.close()  # the next one inherits what this process does with the signal
    template = Template({loop!r}, "2024-07-26")
    template_process.asked_by(template)
    try:
        template_process.render(template, template.key, {{}}, [{{}}])
    except TemplateError as error:
        print(error)

signal.signal(signal.SIGPROF, signal.SIG_IGN)
ended()
signal.signal(signal.SIGPROF, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGPROF}})
ended()
"""


@pytest.mark.fault(62)
def test_a_template_that_loops_is_ended_where_libtpu_has_its_signal_ignored():
    """Or blocked; in a process of its own: where libtpu is loaded its timer would end the process of the tests."""
    code = HELD.format(loop=LOOPS["nested loops"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert [re.search(TIME, line) is not None for line in done.stdout.splitlines()] == [True, True]


@pytest.mark.fault(62)
def test_a_template_that_writes_or_is_too_much_is_refused(tokenizer_folder, tmp_path):
    with pytest.raises(TemplateFails, match=r"writes 3000000 characters, more than 10\d+"):
        render(tokenizer_folder, "{{ 'x' * 3000000 }}")
    with pytest.raises(UserError, match="has 300002 characters, must have at most 262144"):
        render(tokenizer_folder, "{{" + "x" * 300_000)
    path = tmp_path / "long.jinja"
    path.write_text("{{" + "x" * 300_000)
    with pytest.raises(UserError, match="long.jinja.* has more than 262144 characters"):
        render(tokenizer_folder, f"{path}")
    with pytest.raises(TemplateFails) as error:
        render(tokenizer_folder, "{{ raise_exception('y' * 10 ** 7) }}")
    assert len(str(error.value)) < 400
    deep = current = {}
    for _ in range(5000):
        current["a"] = current = {}
    template = ChatTemplate(tokenizer=tokenizer_folder, template="{{ messages | tojson }}")
    with pytest.raises(UserError, match="nests lists and objects more than 100 deep"):
        template.render(Conversation([{"role": "user", "content": "x", "more": deep}]), "a.jsonl:1")


@pytest.mark.fault(62)
def test_a_template_reaches_nothing_outside(tokenizer_folder):
    for template in ("{{ ''.__class__.__mro__ }}", "{% include '/etc/passwd' %}", "{{ self.__init__.__globals__ }}"):
        with pytest.raises(TemplateFails):
            render(tokenizer_folder, template)
    assert render(tokenizer_folder, "{{ messages[0].content }}") == "Hello"
    environ = open(f"/proc/{template_process._process._running.pid}/environ").read()
    assert set(line.partition("=")[0] for line in environ.split("\0")) <= {"", "LD_LIBRARY_PATH"}


@pytest.mark.fault(62)
def test_the_process_of_templates_may_write_nothing_and_start_nothing(tokenizer_folder):
    """Whatever gets past Jinja's sandbox finds the kernel's limits."""
    render(tokenizer_folder, "{{ bos_token }}")
    with open(f"/proc/{template_process._process._running.pid}/limits") as file:
        limits = {line[:26].strip(): line[26:].split()[:2] for line in file}
    for name in ("Max file size", "Max processes", "Max core file size"):
        assert limits[name] == ["0", "0"], name
    assert limits["Max open files"] == ["16", "16"] and "unlimited" not in limits["Max address space"]


@pytest.mark.fault(62)
def test_training_data_of_a_template_that_loops_is_one_error(tokenizer_folder, tmp_path):
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(50)))
    late = "{% if messages | length > 1 and not add_generation_prompt %}" + LOOPS["nested loops"] + "{% endif %}x"
    source = ChatJsonlSource(files=(str(path),), template=ChatTemplate(tokenizer=tokenizer_folder, template=late))
    began_s = time.monotonic()
    with pytest.raises(UserError, match=rf"fails for .*a.jsonl:\d+: it {TIME}"):
        source.open("train")
    assert time.monotonic() - began_s < 10
    ends = ChatTemplate(tokenizer=tokenizer_folder, template="{% for m in messages %}{{ m.content }}</s>{% endfor %}")
    with pytest.raises(UserError, match="has 4000 messages .* too many to find the assistant's text in 2000 of them"):
        render_example(ends, Conversation(turns * 2000), TrainOn.ASSISTANT, "a.jsonl:1")


@pytest.mark.fault(62)
def test_a_server_whose_template_loops_has_completions_alone(tokenizer_folder, capfd):
    def served(template):
        source = ChatJsonlSource(files=(), template=ChatTemplate(tokenizer=tokenizer_folder, template=template))
        return chat.of_served(Dataset(source=source, vocabulary=TokenizerJsonVocabulary(path=tokenizer_folder)))

    assert served(LOOPS["nested loops"]) is None
    *notes, said = capfd.readouterr().err.splitlines()
    assert said.startswith("warning: no chat: ChatTemplate.template fails")
    assert all(note.startswith("note: texts begin with") for note in notes)
    assert served("{{ raise_exception('a system message is needed') }}") is not None  # others may not fail
    assert capfd.readouterr().err == ""


@pytest.mark.fault(62)
def test_special_tokens_are_found_in_linear_time(tokenizer_folder, tmp_path):
    import tokenizers
    from tokenizers import models

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.add_special_tokens([f"<|reserved_{k}|>" for k in range(5000)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = ChatTemplate(tokenizer=str(tmp_path), template="{{ messages[0].content }}")
    said = "<|reserved_" * 50_000 + "<|reserved_4999|>"
    template.render(TALK, "a:1")
    began_s = time.monotonic()
    text = template.render(Conversation([{"role": "user", "content": said}]), "a:1").text
    assert time.monotonic() - began_s < 2 and text == said[: -len("|reserved_4999|>")] + GUARD + "|reserved_4999|>"


@pytest.mark.fault(62)
def test_templates_from_threads_and_forks_beside_one_that_loops(tokenizer_folder):
    template = ChatTemplate(tokenizer=tokenizer_folder, template="{{ messages[0].content }}{{ eos_token }}")
    found, failed = [], []

    def good(number):
        for k in range(20):
            said = f"{number} {k}"
            found.append(template.render(Conversation([{"role": "user", "content": said}]), "x").text == said + "</s>")

    def bad():
        with pytest.raises(TemplateFails, match=TIME):
            render(tokenizer_folder, LOOPS["nested loops"])
        failed.append(True)

    threads = [threading.Thread(target=good, args=(k,)) for k in range(8)] + [threading.Thread(target=bad)]
    for thread in threads:
        thread.start()
    forks = [os.fork() for _ in range(2)]
    if 0 in forks:  # in a fork: the lock may have been held by a thread that is not here
        os._exit(0 if template.render(TALK, "x").text == "Hello</s>" else 1)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in forks] == [0, 0]
    for thread in threads:
        thread.join(60)
    assert found == [True] * 160 and failed == [True]


@pytest.mark.fault(62)
def test_a_process_of_templates_that_is_killed_is_started_again(tokenizer_folder):
    assert render(tokenizer_folder, "{{ bos_token }}") == "<s>"
    for signal_ in (signal.SIGKILL, signal.SIGTERM):
        os.kill(template_process._process._running.pid, signal_)
        assert render(tokenizer_folder, "{{ bos_token }}") == "<s>"


@pytest.mark.fault(62)
def test_a_process_of_templates_that_is_stopped_has_a_deadline(tokenizer_folder, monkeypatch):
    assert render(tokenizer_folder, "{{ bos_token }}") == "<s>"
    template_process._process.close()
    monkeypatch.setattr(template_process, "WAIT_S", 1)
    assert render(tokenizer_folder, "{{ bos_token }}") == "<s>"
    stopped = template_process._process._running
    os.kill(stopped.pid, signal.SIGSTOP)
    assert render(tokenizer_folder, "{{ bos_token }}") == "<s>"
    assert stopped.returncode == -signal.SIGKILL
    template_process._process.close()


# Slow and foreign clients. The server is a process without a model's programs: it is the first to see a client.


class Client:
    """One connection to a server, byte by byte."""

    def __init__(self, address):
        self.socket = socket.create_connection(address, timeout=20)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, text: bytes):
        self.socket.sendall(text)
        return self

    def all(self) -> bytes:
        """What comes until the server closes the connection."""
        got = b""
        while part := self.socket.recv(65536):
            got += part
        return got

    def answer(self) -> tuple[int, dict, bytes]:
        """Status, body and header of a response after which the server closes the connection."""
        head, _, body = self.all().partition(b"\r\n\r\n")
        return int(head.split()[1]), json.loads(body), head


class Vocabulary(ByteVocabulary):
    """Knows the longest text that it was asked to tokenise."""

    longest = 0

    def encode(self, text):
        Vocabulary.longest = max(Vocabulary.longest, len(text))
        return super().encode(text)


class Idle:
    """An engine that is never reached."""

    failed, slots, load, pages, rows = None, 2, (0, 0), (0, 0), 384
    statistics, adapters = type("Statistics", (), {"preempted": 0}), type("Adapters", (), {"names": ()})

    def submit(self, *_, **__):
        raise UserError("no text is made here")


@contextlib.contextmanager
def serving(visitors=None, **takes):
    """A server in a thread; gives its address and its service."""
    listening = server.listen("127.0.0.1", 0)
    service = Service(metrics := ServingMetrics(lambda: service.load))
    vocabulary = Vocabulary()
    served = Served(Idle(), vocabulary, Talk(vocabulary), 256, None, "tiny", Sampling(max_new_tokens=8))
    service.ready(served, ServerConfig(**takes))
    app = app_of(service, metrics, (), *([] if visitors is None else [visitors]))
    thread = threading.Thread(target=server.Server(app, service).run, args=([listening],))
    thread.start()
    try:
        yield listening.getsockname(), service
    finally:
        service.drain()
        thread.join(30)
        assert not thread.is_alive()


class Talk:
    """A chat whose template writes the messages one after another."""

    ends = ()

    def __init__(self, vocabulary):
        self._vocabulary = vocabulary

    def text_after(self, conversation, where):
        return "".join(message["content"] for message in conversation.messages)

    def ids_of(self, text):
        return self._vocabulary.encode(text)


def ask(address, method="GET", path="/health", body=None, **headers):
    connection = http.client.HTTPConnection(*address, timeout=20)
    with contextlib.closing(connection):
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, {"Content-Type": "application/json", **names})
        response = connection.getresponse()
        return response.status, response.read(), response.headers


def error_of(answer: bytes) -> dict:
    error = json.loads(answer)["error"]
    assert error.keys() == {"message", "type", "param", "code"} and "\n" not in error["message"], answer
    return error


def health_s(address) -> float:
    began_s = time.monotonic()
    assert ask(address)[0] == 200
    return time.monotonic() - began_s


POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HALVES = {
    "nothing": (b"", b""),
    "half a line": (b"GET /hea", b" 408 "),
    "half a header": (b"GET /health HTTP/1.1\r\nHost: local", b" 408 "),
    "half a body": (POST + b"Content-Length: 100\r\n\r\n{", b" 408 "),
    "half a chunk": (POST + b"Transfer-Encoding: chunked\r\n\r\nff\r\nx", b" 408 "),
    "a body that nobody reads": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\nx", b" 200 "),
}


@pytest.mark.fault(58)
@pytest.mark.parametrize("name", HALVES)
def test_half_a_request_is_closed_at_a_deadline(name):
    sent, said = HALVES[name]
    with serving(header_timeout_s=0.5, body_timeout_s=0.5) as (address, _), Client(address) as client:
        began_s = time.monotonic()
        got = client.send(sent).all() if said else client.all()
        assert time.monotonic() - began_s < 10 and said in got
        if b" 408 " in got:
            assert error_of(got.partition(b"\r\n\r\n")[2])["code"] == "timeout"


@pytest.mark.fault(58)
@pytest.mark.parametrize("sent", [b"GET /health HTTP/1.1\r\n", POST + b"Content-Length: 9999\r\n\r\n"])
def test_a_client_that_drips_is_closed_at_the_same_deadline(sent):
    with serving(header_timeout_s=1.0, body_timeout_s=1.0) as (address, _), Client(address) as client:
        client.send(sent)
        began_s = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - began_s < 10:
                client.send(b"x")
                time.sleep(0.05)
        assert time.monotonic() - began_s < 5


@pytest.mark.fault(58)
def test_a_slow_client_that_is_in_time_is_answered():
    with serving() as (address, _), Client(address) as client:
        for byte in b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n":
            client.send(bytes([byte]))
        assert client.answer()[:2] == (200, {"status": "ready"})


@pytest.mark.fault(58)
def test_more_connections_than_there_is_room_for_leave_health_quick():
    half = (b"GET /health HTTP/1.1\r\nHost: loc", POST + b"Content-Length: 100\r\n\r\n{")
    with serving(max_connections=32) as (address, _), contextlib.ExitStack() as open_:
        clients = [open_.enter_context(Client(address)).send(half[k % 2]) for k in range(200)]
        assert max(health_s(address) for _ in range(20)) < 0.5
        first = clients[0].all()  # it has made room
        assert not first or error_of(first.partition(b"\r\n\r\n")[2])["code"] == "overloaded"


@pytest.mark.fault(58)
def test_a_client_that_reads_no_answers_is_closed(monkeypatch):
    asked = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100
    with serving(body_timeout_s=0.5) as (address, _), Client(address) as client:
        client.socket.settimeout(10)
        began_s = time.monotonic()
        with pytest.raises(
            ConnectionError
        ):  # until then nothing of it is read, once its answers have filled all buffers
            while True:
                client.send(asked)
        assert time.monotonic() - began_s < 8


# A large header is refused while it is read, or at its end.
FAULTY = {
    "no request line": (b"hello\r\n\r\n", 400),
    "bytes": (bytes(range(256)) * 4 + b"\r\n\r\n", 400),
    "no Host": (b"GET /health HTTP/1.1\r\n\r\n", 400),
    "two Hosts": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
    "no header": (b"GET /health HTTP/1.1\r\nHost localhost\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 50 + b"\r\n\r\n", 400),
    "two lengths": (POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
    "a length that is none": (POST + b"Content-Length: x\r\n\r\n", 400),
    "two ends": (POST + b"Connection: close\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "another coding": (POST + b"Transfer-Encoding: gzip\r\n\r\n", 501),
    "a chunk of no size": (POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    "many small chunks": (POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 1000, 400),
    "no length": (POST + b"Connection: close\r\n\r\n", 411),
    "a long line": (b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431),
    "a long header": (b"GET / HTTP/1.1\r\nHost: localhost\r\nA: " + b"x" * 20_000 + b"\r\nConnection: close\r\n\r\n", 431),
    "many headers": (b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + b"A: b\r\n" * 200 + b"\r\n", 431),
    "a header without end": (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20_000, 431),
    "too large a body": (POST + b"Connection: close\r\nContent-Length: 999999999999\r\n\r\n{", 413),
    "not found": (b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 404),
    "not allowed": (b"DELETE /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 405),
    "a foreign Host": (b"GET /health HTTP/1.1\r\nHost: a.example\r\nConnection: close\r\n\r\n", 403),
}  # fmt: skip


@pytest.mark.fault(58)
def test_whatever_is_no_request_is_answered_in_openais_shape():
    with serving() as (address, _):
        for name, (sent, status) in FAULTY.items():
            with Client(address) as client:
                with contextlib.suppress(OSError):  # it may have said so before all was sent
                    client.send(sent)
                got, body, head = client.answer()
                assert got == status, (name, got, body)
                assert error_of(json.dumps(body).encode())["message"] and b"application/json" in head, name
        assert ask(address)[0] == 200


@pytest.mark.fault(58)
def test_a_client_that_is_still_sending_gets_its_answer():
    """A connection that is closed with unread bytes is reset, and the client may lose what it has not read."""
    with serving() as (address, _):
        for _ in range(20):
            with Client(address) as client:
                with contextlib.suppress(OSError):
                    client.send(b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200_000)
                time.sleep(0.05)
                assert client.answer()[0] == 431
        assert ask(address)[0] == 200


# Pages of others.

ALLOWED = ("localhost", "LOCALHOST:80", "127.0.0.1", "127.0.0.1:9", "[::1]", "[::1]:8000", "localhost:")
FOREIGN = ("a.example", "localhost.a.example", "127.0.0.1.a.example:80", "[::2]", "10.0.0.1", "", "localhost:80:80")
FOREIGN += (
    "user@localhost",
    "localhost/",
    "127.0.0.1, a.example",
    "0.0.0.0",
    "::1",
    "localhost\xa0",
    "1",
    "2130706433",
)


@pytest.mark.fault(59)
def test_a_foreign_host_is_refused_on_loopback():
    with serving() as (address, service):
        for path in ("/health", "/v1/models", "/metrics", "/nothing"):
            status, answer, _ = ask(address, path=path, Host="rebound.example:8000")
            assert status == 403 and error_of(answer)["code"] == "host_not_allowed"
        for host in ALLOWED:
            assert ask(address, Host=host)[0] == 200, host
        for host in FOREIGN:
            assert ask(address, Host=host)[0] == 403, host
        status, answer, _ = ask(address, "POST", "/v1/completions", b"{", Host="rebound.example")
        assert status == 403 and "ServerConfig.allowed_hosts" in error_of(answer)["message"]
        service.config = dataclasses.replace(service.config, allowed_hosts=("mine.example", "[fd00::1]"))
        for host in ("mine.example", "Mine.Example:8000", "[fd00::1]:1", "localhost"):
            assert ask(address, Host=host)[0] == 200, host
        assert ask(address, Host="not.mine.example")[0] == 403


@pytest.mark.fault(59)
def test_a_foreign_origin_is_refused():
    with serving() as (address, service):
        own = "http://{}:{}".format(*address)
        for origin in (own, "http://localhost:3000", "https://127.0.0.1", "http://[::1]:1"):
            status, _, headers = ask(address, Origin=origin)
            assert status == 200 and headers["Access-Control-Allow-Origin"] == origin, origin
            assert "Origin" in headers["Vary"]
        foreign = (
            "null",
            "http://a.example",
            "https://localhost.a.example",
            "file://",
            "localhost",
            "http://localhost@a",
        )
        for origin in (
            *foreign,
            "",
            "chrome-extension://abc",
            "http://localhost/",
            "http://localhost http://a.example",
        ):
            for method, path in (("GET", "/health"), ("POST", "/v1/completions"), ("OPTIONS", "/v1/completions")):
                status, answer, headers = ask(address, method, path, Origin=origin)
                assert status == 403 and error_of(answer)["code"] == "origin_not_allowed", (origin, method)
                assert "Access-Control-Allow-Origin" not in headers
        assert ask(address)[2]["Access-Control-Allow-Origin"] is None
        service.config = dataclasses.replace(service.config, allowed_origins=("https://chat.example",))
        wanted = {
            "Access_Control_Request_Method": "POST",
            "Access_Control_Request_Headers": "authorization,x-stainless-os",
        }
        status, answer, headers = ask(address, "OPTIONS", "/v1/completions", Origin="https://chat.example", **wanted)
        assert (status, answer, headers["Access-Control-Allow-Origin"]) == (204, b"", "https://chat.example")
        assert "x-stainless-os" in headers["Access-Control-Allow-Headers"]
        assert ask(address, "OPTIONS", "/v1/completions", Origin="https://a.example", **wanted)[0] == 403
        assert ask(address, "OPTIONS", "/v1/completions")[0] == 405


@pytest.mark.fault(59)
def test_who_may_come_to_a_server_that_others_reach():
    """Its names are not known, and a key is needed: any Host will do, but for those that the user rules out."""
    visitors = visitors_of("0.0.0.0", "0.0.0.0", is_loopback=False)
    with serving(visitors) as (address, service):
        assert ask(address, Host="model.example")[0] == 200
        assert ask(address, Host="model.example", Origin="https://model.example")[0] == 200
        assert ask(address, Host="model.example:80", Origin="http://model.example")[0] == 200
        for origin in ("https://a.example", "null", "http://localhost:3000", "https://model.example:444"):
            assert ask(address, Host="model.example", Origin=origin)[0] == 403
        service.config = dataclasses.replace(service.config, allowed_hosts=("model.example",))
        assert ask(address, Host="model.example")[0] == 200 and ask(address, Host="a.example")[0] == 403
    named = visitors_of("mybox", "127.0.1.1", is_loopback=True)
    with serving(named) as (address, _):
        assert [ask(address, Host=host)[0] for host in ("mybox:1", "127.0.1.1", "other")] == [200, 200, 403]
    for wrong in ({"allowed_hosts": ("http://a",)}, {"allowed_hosts": ("a:80",)}, {"allowed_origins": ("null",)}):
        with pytest.raises(UserError, match="must be"):
            ServerConfig(**wrong)


# Prompts that cost much.

MB = 2**20
LARGE = {
    "a prompt": ("completions", {"prompt": "x" * MB}, "prompt"),
    "words": ("completions", {"prompt": "a word " * (MB // 7)}, "prompt"),
    "prompts": ("completions", {"prompt": ["x" * (MB // 8)] * 8}, "prompt"),
    "a message": ("chat/completions", {"messages": [{"role": "user", "content": "x" * MB}]}, "messages"),
    "a part": ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * MB}]}]}, "messages"),
    "a key": ("chat/completions", {"messages": [{"role": "user", "content": "x", "y" * MB: 1}]}, "messages"),
    "messages": ("chat/completions", {"messages": [{"role": "user", "content": "x"}] * 2_000}, "messages"),
    "parts": ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 10_000}]}, "messages"),
    "tools": ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "f", "description": "x" * MB}]}, "tools"),
    "arguments": ("chat/completions", {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "[" * MB}}]}]}, "messages"),
    "tokens": ("completions", {"prompt": [5] * 60_000}, "prompt"),
    "many tokens": ("completions", {"prompt": [5] * (MB // 4)}, None),
    "many messages": ("chat/completions", {"messages": [{"role": "user", "content": "x"}] * 20_000}, None),
    "values": ("completions", {"prompt": [[]] * (MB // 4)}, None),
    "a deep one": ("chat/completions", {"messages": [{"role": "user", "content": "x", "y": "DEEP"}]}, "messages"),
    "parameters": ("completions", {"prompt": "x", **{f"p{k}": 1 for k in range(5000)}}, None),
    "stops": ("completions", {"prompt": "x", "stop": ["y"] * 50_000}, "stop"),
    "a stop": ("completions", {"prompt": "x", "stop": "y" * MB}, "stop"),
    "a bias": ("completions", {"prompt": "x", "logit_bias": {f"{k}": 1 for k in range(50_000)}}, "logit_bias"),
    "a name": ("completions", {"prompt": "x", "z" * MB: 1}, "z"),
}  # fmt: skip


@pytest.mark.fault(60)
def test_a_prompt_of_1_mb_is_refused_before_it_is_tokenised():
    with serving() as (address, service):
        Vocabulary.longest = 0
        for name, (path, given, param) in LARGE.items():
            body = json.dumps({"model": "tiny", **given}).replace('"DEEP"', "[" * 150 + "]" * 150)
            began_s = time.monotonic()
            status, answer, _ = ask(address, "POST", f"/v1/{path}", body)
            assert status == 400, (name, status, answer)
            error = error_of(answer)
            assert (error["param"] or "").startswith(param or "") and len(error["message"]) < 2000 + MB, name
            assert time.monotonic() - began_s < 2, name
        assert Vocabulary.longest <= 1 and service.body_bytes == 0
        ask(address, "POST", "/v1/completions", json.dumps({"model": "tiny", "prompt": "x" * 50}))
        assert Vocabulary.longest == 50  # that is how it would be seen


@pytest.mark.fault(60)
@pytest.mark.parametrize("key", ["arguments", "parameters"])
def test_json_within_json_has_a_bound_of_its_own(key):
    """A model that reads much text would else be given much to parse."""
    served = Served(Idle(), Vocabulary(), None, 10**6, None, "tiny", Sampling())

    def conversation(size):
        return [{"role": "assistant", "tool_calls": [{"function": {"name": "f", key: "[" * size}}]}]

    bounds.check_conversation(conversation(2**17), None, served, ServerConfig())
    with pytest.raises(Refusal, match=f"messages has {key} of 131073 characters, must have at most 131072"):
        bounds.check_conversation(conversation(2**17 + 1), None, served, ServerConfig())


@pytest.mark.fault(60)
def test_many_large_prompts_at_once_leave_health_quick():
    bodies = [
        json.dumps({"model": "tiny", "prompt": "x" * 10**6}),
        json.dumps({"model": "tiny", "prompt": [[]] * 300_000}),
    ]
    with serving() as (address, service), ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(ask, address, "POST", "/v1/completions", bodies[k % 2]) for k in range(40)]
        longest_s = 0.0
        while not all(one.done() for one in waiting):
            longest_s = max(longest_s, health_s(address))
        assert {one.result()[0] for one in waiting} == {400} and longest_s < 1.0
        assert service.body_bytes == 0


@pytest.mark.fault(60)
def test_bodies_together_have_a_bound():
    with serving(max_bodies_mib=1) as (address, service), Client(address) as first:
        first.send(POST + b"Content-Length: 1000000\r\n\r\n" + b"x" * 900_000)
        until(lambda: service.body_bytes > 800_000)
        status, answer, headers = ask(address, "POST", "/v1/completions", "x" * 500_000)
        assert status == 503 and error_of(answer)["code"] == "overloaded" and headers["Retry-After"]
        first.socket.close()
        until(lambda: service.body_bytes == 0)
        assert ask(address, "POST", "/v1/completions", "x" * 500_000)[0] == 400


def until(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)
