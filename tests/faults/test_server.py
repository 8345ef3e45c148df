"""Attacks on a server and by a model's chat template: slow clients, foreign pages, prompts that cost much, templates
that loop or allocate."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import pytest

from capibara.data import template_process
from capibara.data.chat_formats import Conversation
from capibara.data.chat_template import ChatTemplate, TemplateFails
from capibara.types import UserError

TALK = Conversation([{"role": "user", "content": "Hello"}])
TIME, MEMORY, DEEP = r"takes more than 1\.\d s: it loops", "needs more than 256 MiB of memory", "too deeply"

# Templates that Jinja's own sandbox lets through.
LOOPS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "numbers": "{{ 3 ** (10 ** 8) }}",
    "lists": "{{ range(10) | slice(10 ** 9) | list }}",
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
    for templates, said in ((LOOPS, TIME), (ALLOCATES, MEMORY), (NESTED, DEEP))
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
    monkeypatch.setattr(template_process, "_WAIT_S", 1)
    assert render(tokenizer_folder, "{{ bos_token }}") == "<s>"
    stopped = template_process._process._running
    os.kill(stopped.pid, signal.SIGSTOP)
    assert render(tokenizer_folder, "{{ bos_token }}") == "<s>"
    assert stopped.returncode == -signal.SIGKILL
    template_process._process.close()
