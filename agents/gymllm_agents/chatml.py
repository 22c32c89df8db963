"""gymllm's own chat template: ChatML, with tools in the Hermes form."""

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"

CHATML_TEMPLATE = r"""
{%- set opening = messages[0].content if messages and messages[0].role == 'system' else '' -%}
{%- if tools -%}
  {{- '<|im_start|>system\n' -}}
  {%- if opening -%}{{- opening + '\n\n' -}}{%- endif -%}
  {{- 'You may call these functions:\n<tools>' -}}
  {%- for tool in tools -%}{{- '\n' + (tool | tojson) -}}{%- endfor -%}
  {{- '\n</tools>\nTo call one, write\n<tool_call>\n' -}}
  {{- '{"name": <function name>, "arguments": <object of arguments>}\n</tool_call><|im_end|>\n' -}}
{%- elif opening -%}
  {{- '<|im_start|>system\n' + opening + '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    {#- Results that follow each other share one user turn. -#}
    {%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' -}}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
  {%- elif message.role != 'system' or not loop.first -%}
    {{- '<|im_start|>' + message.role + '\n' + message.content -}}
    {%- for call in message.tool_calls or [] -%}
      {%- set function = call.function or call -%}
      {{- '\n' if message.content or not loop.first else '' -}}
      {{- '<tool_call>\n{"name": "' + function.name + '", "arguments": ' -}}
      {{- (function.arguments if function.arguments is string else function.arguments | tojson) -}}
      {{- '}\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
"""The template's Jinja source. Contents are never trimmed, so it extends its own prefix."""
