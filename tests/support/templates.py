"""Chat templates that write as five families of models do, with the habits that make turns hard to find.

Written for the tests: Llama 3 trims contents and begins with a date; Qwen puts a system message where there is none and
drops old thoughts; Mistral moves the system message into the last user's turn and insists on alternating roles.
"""

LLAMA_3 = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n' + system + '<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}"""

QWEN = """
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}
{%- endif %}
{%- set last = namespace(user=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set thought = message.reasoning_content if message.reasoning_content is defined else '' %}
    {%- if message.role == 'assistant' and loop.index0 > last.user and (loop.last or thought) %}
        {{- '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
        {{- message.content.lstrip('\n') }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

MISTRAL = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{%- set last = namespace(user=0) %}
{%- for message in turns %}
    {%- if message['role'] == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in turns %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.index0 == last.user and system is defined %}
            {{- '[INST] ' + system + '\n\n' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + message['content'] + '[/INST]' }}
        {%- endif %}
    {%- else %}
        {{- ' ' + message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}"""

# With tools: arguments as text alone (DeepSeek V3), calls and results with ids (Mistral).
_TURNS = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'tool' %}{{- '<result>' + message.content }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {%- for call in message.tool_calls %}CALL{%- endfor %}
    {%- else %}{{- message.content }}{%- endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
_DESCRIBED = "{%- if tools %}{{- '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{%- endif %}"

TOOLS_AS_TEXT = _DESCRIBED + _TURNS.replace(
    "CALL", "{{- call.function.name + '\n' + call.function.arguments + '<|call|>' }}"
)

TOOLS_WITH_IDS = """
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
            {%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (', ' if not loop.last else ']') }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + (message.content | tojson) }}
        {{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- else %}
        {{- message.content }}
    {%- endif %}
{%- endfor %}"""
