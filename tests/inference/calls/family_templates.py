"""Small chat templates, each with the tokens and the form of a family; an assistant's turn is what they render."""

from __future__ import annotations

import json

import jinja2

THINK = "{% if m.reasoning %}<think>\n{{ m.reasoning }}\n</think>\n\n{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
EACH = "{% for k, v in f.arguments.items() %}"
TEXT = "{{ v if v is string else v | tojson }}"
PYTHON = (
    "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | repr }}{{ ', ' if not loop.last }}{% endfor %})"
)


def _objects(
    begin: str, end: str, item: str = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
) -> str:
    """Each object between markers."""
    return f"{{{{ m.content }}}}{CALLS}{begin}{item}{end}{{% endfor %}}"


def _listed(
    begin: str, end: str, item: str = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
) -> str:
    """A list of all objects between markers."""
    comma = "{{ ', ' if not loop.last }}"
    return f"{{{{ m.content }}}}{{% if m.tool_calls %}}{begin}[{CALLS}{item}{comma}{{% endfor %}}]{end}{{% endif %}}"


def _section(begin: str, call: str, end: str) -> str:
    """Calls between the markers of all calls."""
    return f"{{{{ m.content }}}}{{% if m.tool_calls %}}{begin}{CALLS}{call}{{% endfor %}}{end}{{% endif %}}"


def _xml(begin: str, key: str, value_end: str, end: str) -> str:
    return f"{{{{ m.content }}}}{CALLS}{begin}{EACH}{key}{TEXT}{value_end}{{% endfor %}}{end}{{% endfor %}}"


_DSML = (
    '<｜DSML｜invoke name="{{ f.name }}">\n'
    + EACH
    + "<｜DSML｜parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">"
    + TEXT
    + "</｜DSML｜parameter>\n{% endfor %}</｜DSML｜invoke>\n"
)
_INVOKE = (
    '<invoke name="{{ f.name }}">\n'
    + EACH
    + '<parameter name="{{ k }}">'
    + TEXT
    + "</parameter>\n{% endfor %}</invoke>\n"
)
_HARMONY = (
    "{% if m.reasoning %}<|channel|>analysis<|message|>{{ m.reasoning }}<|end|><|start|>assistant{% endif %}"
    "{% if m.content %}<|channel|>{{ 'commentary' if m.tool_calls else 'final' }}<|message|>{{ m.content }}"
    "{% if m.tool_calls %}<|end|><|start|>assistant{% endif %}{% endif %}"
    + CALLS
    + "<|channel|>commentary to=functions.{{ f.name }} <|constrain|>json<|message|>{{ f.arguments | tojson }}"
    "{% if not loop.last %}<|end|><|start|>assistant{% endif %}{% endfor %}"
)
_GEMMA = (
    "{% if m.reasoning %}<|channel>thought\n{{ m.reasoning }}\n<channel|>{% endif %}{{ m.content }}"
    + CALLS
    + "<|tool_call>call:{{ f.name }}{{ '{' }}"
    + EACH
    + "{{ k }}:{{ v | gemma }}{{ ',' if not loop.last }}{% endfor %}}<tool_call|>{% endfor %}"
)
# Form -> template, and further tokens of the tokenizer.
TEMPLATES: dict[str, tuple[str, tuple[str, ...]]] = {
    "hermes": (THINK + _objects("\n<tool_call>\n", "\n</tool_call>"), ()),
    "granite code": (_objects("<function_call> ", "\n"), ()),
    "gigachat": (_objects("<|function_call|>", ""), ()),
    "internlm": (
        _objects("<|action_start|><|plugin|>\n", "<|action_end|>", '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'),
        (),
    ),
    "llama": (
        "{% if not m.tool_calls %}{{ m.content }}{% endif %}"
        + CALLS
        + '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{{ "; " if not loop.last }}{% endfor %}',
        ("<|python_tag|>",),
    ),
    "xlam": ("{# \"tool_call_name\" #}" + _listed("", "").replace("{{ m.content }}", "{% if not m.tool_calls %}{{ m.content }}{% endif %}", 1), ()),
    "command": (
        "{% if m.reasoning %}<|START_THINKING|>{{ m.reasoning }}<|END_THINKING|>{% endif %}"
        "{% if m.content %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% endif %}"
        + _listed(
            "<|START_ACTION|>",
            "<|END_ACTION|>",
            '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
        ).removeprefix("{{ m.content }}"),
        (),
    ),
    "command r": (
        _listed(
            "\nAction:\n```json\n",
            "\n```",
            '{"tool_name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
        ),
        (),
    ),
    "apertus": (
        "{% if m.reasoning %}<|inner_prefix|>{{ m.reasoning }}<|inner_suffix|>{% endif %}"
        + _listed("<|tools_prefix|>", "<|tools_suffix|>", '{"{{ f.name }}": {{ f.arguments | tojson }}}'),
        (),
    ),
    "phi": (_listed("<|tool_call|>", "<|/tool_call|>"), ()),
    "functools": (_listed(" functools", ""), ()),
    "granite": (THINK + _listed("<|tool_call|>", ""), ()),
    "listed": (THINK + _listed("<tool_calls>", "</tool_calls>"), ()),
    "nemotron": (THINK + _listed("<TOOLCALL>", "</TOOLCALL>"), ()),
    "mistral list": (_listed("[TOOL_CALLS] ", ""), ()),
    "mistral": (
        "{% if m.reasoning %}[THINK]{{ m.reasoning }}[/THINK]{% endif %}{{ m.content }}"
        + CALLS
        + "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]{{ f.arguments | tojson }}{% endfor %}",
        (),
    ),
    "deepseek v3": (
        _section(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```<｜tool▁call▁end｜>\n",
            "<｜tool▁calls▁end｜>",
        ),
        (),
    ),
    "deepseek v3.1": (
        _section(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ),
        (),
    ),
    "deepseek v3.2": (THINK + _section("\n\n<｜DSML｜function_calls>\n", _DSML, "</｜DSML｜function_calls>"), ()),
    "deepseek v4": (THINK + _section("\n\n<｜DSML｜tool_calls>\n", _DSML, "</｜DSML｜tool_calls>"), ()),
    "deepseek v4.1": (
        THINK
        + _section(
            "\n\n<｜DSML｜ calls>\n",
            _DSML.replace("｜DSML｜invoke", "｜DSML｜ invoke").replace("｜DSML｜parameter", "｜DSML｜ parameter"),
            "</｜DSML｜ calls>",
        ),
        (),
    ),
    "plamo 3": (
        THINK.replace("<think>", "<|plamo:begin_think:plamo|>").replace("</think>", "<|plamo:end_think:plamo|>")
        + _section(
            "<|plamo:begin_tool_requests:plamo|>",
            "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>{{ f.name }}<|plamo:end_tool_name:plamo|>"
            "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{{ f.arguments | tojson }}"
            "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>",
            "<|plamo:end_tool_requests:plamo|>",
        ),
        (),
    ),
    "minimax m2": (THINK + _section("\n<minimax:tool_call>\n", _INVOKE, "</minimax:tool_call>"), ()),
    "dots": (THINK + _section("\n<dots_function_call>\n", _INVOKE, "</dots_function_call>"), ()),
    "longcat": (THINK + _objects("<longcat_tool_call>\n", "\n</longcat_tool_call>\n"), ()),
    "minimax m3": (
        THINK.replace("think>", "mm:think>")
        + _section(
            "\n]<]minimax[>[<tool_call>\n",
            ']<]minimax[>[<invoke name="{{ f.name }}">{{ f.arguments | elements }}]<]minimax[>[</invoke>\n',
            "]<]minimax[>[</tool_call>",
        ),
        (),
    ),
    "step 3": (
        THINK
        + _section(
            "\n<｜tool_calls_begin｜>",
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{{ f.name }}">'
            + EACH
            + '<steptml:parameter name="{{ k }}">'
            + TEXT
            + "</steptml:parameter>{% endfor %}</steptml:invoke><｜tool_call_end｜>",
            "<｜tool_calls_end｜>",
        ),
        (),
    ),
    "minicpm 5": (
        THINK
        + _xml(
            '\n<function name="{{ f.name }}">',
            "<param name=\"{{ k }}\">{{ '<![CDATA[' if v is string }}",
            "{{ ']]>' if v is string }}</param>",
            "</function>",
        ),
        (),
    ),
    "k2 horizon": (
        THINK.replace("think>", "ifm|think>")
        + _section(
            "\n<ifm|tool_calls>\n",
            "<ifm|tool_call>{{ f.name }}\n"
            + EACH
            + "<ifm|arg_key>{{ k }}</ifm|arg_key>\n<ifm|arg_type>{{ v | kind }}</ifm|arg_type>\n<ifm|arg_value>"
            + TEXT
            + "</ifm|arg_value>\n{% endfor %}</ifm|tool_call>\n",
            "</ifm|tool_calls>",
        ),
        (),
    ),
    "kimi k3": (
        "{% if m.reasoning %}<|open|>think<|sep|>{{ m.reasoning }}<|close|>think<|sep|>{% endif %}"
        "<|open|>response<|sep|>{{ m.content }}<|close|>response<|sep|>"
        + _section(
            "<|open|>tools<|sep|>",
            '<|open|>call tool="{{ f.name }}" index="{{ loop.index }}"<|sep|>'
            + EACH
            + '<|open|>argument key="{{ k }}" type="{{ v | kind }}"<|sep|>'
            + TEXT
            + "<|close|>argument<|sep|>{% endfor %}<|close|>call<|sep|>",
            "<|close|>tools<|sep|>",
        ).removeprefix("{{ m.content }}"),
        (),
    ),
    "hy 3": (
        THINK
        + _section(
            "<tool_calls>\n",
            "<tool_call>{{ f.name }}<tool_sep>\n"
            + EACH
            + "<arg_key>{{ k }}</arg_key>\n<arg_value>"
            + TEXT
            + "</arg_value>\n{% endfor %}</tool_call>\n",
            "</tool_calls>",
        ),
        (),
    ),
    "kimi k2": (
        _section(
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>",
            "<|tool_calls_section_end|>",
        ),
        (),
    ),
    "functionary": (_objects("<function={{ f.name }}>", "</function>", "{{ f.arguments | tojson }}"), ()),
    "qwen xml": (
        THINK
        + _xml(
            "\n\n<tool_call>\n<function={{ f.name }}>\n",
            "<parameter={{ k }}>\n",
            "\n</parameter>\n",
            "</function>\n</tool_call>",
        ),
        (),
    ),
    "seed": (
        THINK.replace("think>", "seed:think>")
        + _xml(
            "\n<seed:tool_call>\n<function={{ f.name }}>\n",
            "<parameter={{ k }}>",
            "</parameter>\n",
            "</function>\n</seed:tool_call>",
        ),
        (),
    ),
    "glm": (
        THINK
        + _xml("\n<tool_call>{{ f.name }}\n", "<arg_key>{{ k }}</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>"),
        (),
    ),
    "lfm2": (THINK + _listed("<|tool_call_start|>", "<|tool_call_end|>", PYTHON), ()),
    "llama 4": (
        "{% if not m.tool_calls %}{{ m.content }}{% endif %}" + _listed("", "", PYTHON).removeprefix("{{ m.content }}"),
        ("<|python_start|>", "<|python_end|>"),
    ),
    "olmo 3": (_section("<function_calls>", PYTHON + "\n", "</function_calls>"), ()),
    "gemma 4": (_GEMMA, ()),
    "functiongemma": (
        _GEMMA.replace("<|tool_call>", "<start_function_call>")
        .replace("<tool_call|>", "<end_function_call>")
        .replace("v | gemma", "v | escaped"),
        (),
    ),
    "solar open": (
        "{% if m.reasoning %}<|think|>{{ m.reasoning }}<|end|><|begin|>assistant{% endif %}"
        "{% if m.content %}<|content|>{{ m.content }}<|end|>{{ '<|begin|>assistant' if m.tool_calls }}{% endif %}"
        "{% if m.tool_calls %}<|tool_calls|>"
        + CALLS
        + "<|tool_call:begin|>{{ c.id }}<|tool_call:name|>{{ f.name }}<|tool_call:args|>{{ f.arguments | tojson }}<|tool_call:end|>"
        "{% endfor %}{% endif %}",
        (),
    ),
    "harmony": (_HARMONY, ("<|channel|>",)),
    "muse": (
        "{% if m.reasoning %} to=self<|message|>{{ m.reasoning }}<|eom|><|start|>assistant{% endif %}"
        "{% if m.content %} to=user<|message|>{{ m.content }}{{ '<|eom|><|start|>assistant' if m.tool_calls }}{% endif %}"
        + CALLS
        + ' to={{ f.name }}<|message|><atem:function_calls>\n<atem:invoke name="{{ f.name }}">\n'
        + EACH
        + '<atem:parameter name="{{ k }}">'
        + TEXT
        + "</atem:parameter>\n{% endfor %}</atem:invoke>\n</atem:function_calls>"
        "{{ '<|eom|><|start|>assistant' if not loop.last }}{% endfor %}",
        (),
    ),
}  # fmt: skip


def _gemma(value: object) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return f"[{','.join(map(_gemma, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def _escaped(value: object) -> str:
    return f"<escape>{value if isinstance(value, str) else json.dumps(value)}<escape>"


def _elements(value: object) -> str:
    """As MiniMax M3's template writes a value: objects and lists as elements, a string as it is."""
    mark = "]<]minimax[>["
    if isinstance(value, dict):
        return "".join(f"{mark}<{key}>{_elements(item)}{mark}</{key}>" for key, item in value.items())
    if isinstance(value, list):
        return "".join(f"{mark}<item>{_elements(item)}{mark}</item>" for item in value)
    return value if isinstance(value, str) else json.dumps(value)


def _kind(value: object) -> str:
    """The type of a value in JSON."""
    names = {bool: "boolean", type(None): "null", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "number")


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment()
    environment.filters |= {
        "tojson": lambda value: json.dumps(value, ensure_ascii=False),
        "repr": repr,
        "gemma": _gemma,
        "escaped": _escaped,
        "elements": _elements,
        "kind": _kind,
    }
    return environment


def render(template: str, message: dict) -> str:
    """An assistant's turn."""
    return _environment().from_string(template).render(m=message)
