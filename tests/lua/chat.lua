-- Chat templates: what published models' templates write (the texts are those of Hugging Face's Jinja), and what is refused.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

local t = m.tokenizer "bytes"
local messages = { { role = "user", content = " Hi " }, { role = "assistant", content = "Yes?" }, { role = "user", content = "1+1?\n" } }
local function chat(template, options, list)
  options = options or {}
  options.template = template
  return (t:chat(list or messages, options))
end

check.equal(chat("{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nA.<|im_end|>\\n' }}"
  .. "{% endif %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
  .. "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"),
  "<|im_start|>system\nA.<|im_end|>\n<|im_start|>user\n Hi <|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n<|im_start|>user\n1+1?\n<|im_end|>\n"
  .. "<|im_start|>assistant\n")
check.equal(chat("{% for message in messages %}{% set content = '[' + message['role'] + ']\n' + message['content'] | trim %}"
  .. "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}", { bos_token = "<s>", prompt = false }),
  "<s>[user]\nHi[assistant]\nYes?[user]\n1+1?")
-- A namespace, a reversed list, blocks on lines of their own.
check.equal(chat [[
{%- set ns = namespace(last=0, open=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.open and message.role == "user" and not(message.content.startswith('<tool>')) %}
        {%- set ns.open = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{{- 'last ' ~ ns.last }}
{% for message in messages %}
  {% if message.role == 'user' %}
  u {{ message.content|trim }}
  {% elif message.role is defined and message.name is not defined %}
  a
  {% endif %}
{% endfor %}
{%- if think is defined and think is false %}no{% else %}yes{% endif %}]], "last 2\n  u Hi\n  a\n  u 1+1?\nyes")
check.equal(chat("{{ tools|tojson }} {{ tools[0]|tojson(indent=2) }}", { tools = { { name = 'f"', list = { 1, "b" }, none = {} } } }),
  '[{"list": [1, "b"], "name": "f\\"", "none": []}] {\n  "list": [\n    1,\n    "b"\n  ],\n  "name": "f\\"",\n  "none": []\n}')
check.equal(chat("{% macro show(x, y='d') %}[{{ x }}:{{ y }}]{% endmacro %}{{ show('a') }}{{ show('b', y=2) }}{% for r in messages|map(attribute='role') if r != 'user' %}"
  .. "{{ r|upper }}{% endfor %}{{ (messages|selectattr('role', 'equalto', 'user')|list)|length }}{{ x|default('-') }}{{ none }}{{ 7 // 2 }}{{ 'a-b'.split('-')[-1] }}"),
  "[a:d][b:2]ASSISTANT2-None3b")
check.equal(select(2, t:chat({ { role = "user", content = "a" } }, { template = "{{ messages[0].content }}b" }))[2], 98)
check.raises("the chat template refuses the messages: roles must alternate", chat, "{{ raise_exception('roles must alternate') }}")
check.raises("line 2 of the chat template: the filter rot13 is not supported", chat, "a\n{{ messages|rot13 }}")
check.raises("the statement include is not supported", chat, "{% include 'x' %}")
check.raises("the test prime is not supported", chat, "{{ 3 is prime }}")
check.raises("a statement has no", chat, "{% if true %}")
check.raises("{{ has no }}", chat, "{{ 'a }}")
check.raises("line 1 of the chat template: attempt to", chat, "{{ messages + 1 }}")
check.raises("is not a function that is supported", chat, "{{ messages.frob() }}")
check.raises("has no chat template", t.chat, t, messages)
check.raises("chat takes a list of messages, got \"Hi\"", t.chat, t, "Hi")
check.raises("chat is a method of a tokenizer", t.chat, messages)
check.done()
