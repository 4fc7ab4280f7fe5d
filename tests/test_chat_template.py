"""Chat templates: what transformers makes of them, token by token; where they are looked for; what a bad one says."""

import json

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from areal_jax.tokenizer import Tokenizer

CHATML, THINK = ["<|im_start|>", "<|im_end|>"], ["<think>", "</think>"]
LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
SPECIAL = ["<s>", "</s>", *CHATML, *LLAMA, "<|User|>", "<|Assistant|>", *THINK]
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou "
    "are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN3 = """{%- if tools %}
    {{- 'tools: ' + (tools | tojson) }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == 'user' and message.content is string %}
        {%- set ns.last = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and '</think>' in message.content %}
        {{- message.content.split('</think>')[-1].lstrip('\\n') }}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA32 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Cutting Knowledge Date: December 2023\\nToday Date: " + date_string + "\\n\\n<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
R1_DISTILL = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{% set ns = "
    "namespace(is_first=false, is_tool=false, system_prompt='') %}{%- for message in messages %}{%- if message['role'] "
    "== 'system' %}{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}{{bos_token}}"
    "{{ns.system_prompt}}{%- for message in messages %}{%- if message['role'] == 'user' %}{%- set ns.is_tool = false "
    "-%}{{'<|User|>' + message['content']}}{%- endif %}{%- if message['role'] == 'assistant' and message['content'] is "
    "not none %}{% set content = message['content'] %}{% if '</think>' in content %}{% set content = "
    "content.split('</think>')[-1] %}{% endif %}{{'<|Assistant|>' + content + eos_token}}{%- endif %}{%- endfor -%}"
    "{% if add_generation_prompt and not ns.is_tool %}{{'<|Assistant|><think>\\n'}}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if "
    "message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == "
    "'assistant' %}{{ message['content'] + eos_token}}{% else %}{{ raise_exception('Only user and assistant roles are "
    "supported!') }}{% endif %}{% endfor %}"
)
EVERYTHING = """{# what templates may use beyond plain Jinja #}
{% for message in messages %}
    {% if message['role'] == 'assistant' %}
        {% generation %}
{{ message['content'] }}{{ eos_token }}
        {% endgeneration %}
    {% continue %}
    {% endif %}
    <{{ message['role'] }}> {{ message | tojson }}
    {{ {'b': [1, "ü<&>"], 'a': none} | tojson(indent=2, sort_keys=true) }}
{% endfor %}
{{ dict(a=1) }} {{ pad_token is defined }} {{ unk_token is defined }}
"""
TEMPLATES = {
    "smollm2": SMOLLM2,
    "qwen3": QWEN3,
    "llama3": LLAMA3,
    "llama32": LLAMA32,
    "r1-distill": R1_DISTILL,
    "mistral": MISTRAL,
    "everything": EVERYTHING,
}
ASK = [{"role": "user", "content": " What is 3 + 4?\nGive <b>one</b> number & <|im_end|> no more. "}]
TALK = [*ASK, {"role": "assistant", "content": "<think>\n3, 4\n</think>\n\n7"}, {"role": "user", "content": "And ü?"}]
SYSTEM = [{"role": "system", "content": "You are terse."}, *ASK]
CONVERSATIONS = {"ask": ASK, "talk": TALK, "system": SYSTEM}


def write(directory, *, files=None, **config):
    """A model directory's tokenizer: byte-level BPE that adds <s> in front by itself."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.train_from_iterator(
        ["What is the number? You are a helpful assistant user system"] * 3,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    library.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
        "pad_token": None,
        **config,
    }
    for name, content in {"tokenizer_config.json": config, **(files or {})}.items():
        (directory / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return directory


def both(directory):
    transformers = pytest.importorskip("transformers", reason="the reference is the package transformers")
    return Tokenizer.load(directory), transformers.AutoTokenizer.from_pretrained(str(directory))


def assert_same(directory, messages, **variables):
    ours, theirs = both(directory)
    options = {"add_generation_prompt": True, **variables}
    text = theirs.apply_chat_template(messages, tokenize=False, **options)
    assert ours.render_chat(messages, **variables) == text
    tokens = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    assert ours.encode_chat(messages, **variables) == tokens
    return text, tokens


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "mistral"])
def test_text_and_tokens_are_those_of_transformers(tmp_path, name, conversation):
    text, tokens = assert_same(write(tmp_path, chat_template=TEMPLATES[name]), CONVERSATIONS[conversation])
    assert tokens.count(0) == text.count("<s>") <= 1  # the template's own BOS, and no other
    assert name != "r1-distill" or text.endswith("<|Assistant|><think>\n")


@pytest.mark.parametrize("conversation", ["ask", "talk"])
def test_mistrals_text_and_tokens_are_those_of_transformers(tmp_path, conversation):
    text, _ = assert_same(write(tmp_path, chat_template=MISTRAL), CONVERSATIONS[conversation])
    assert text.startswith("<s>[INST]  What") and text.endswith("[/INST]")


def test_variables_reach_the_template(tmp_path):
    directory = write(tmp_path, chat_template=QWEN3)
    text, _ = assert_same(directory, ASK, enable_thinking=False)
    assert text.endswith("<think>\n\n</think>\n\n")
    assert not Tokenizer.load(directory).render_chat(ASK).endswith("</think>\n\n")


def test_the_variables_of_a_template_are_what_a_caller_may_set(tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path, chat_template=LLAMA32 + QWEN3))
    assert tokenizer.chat_variables == {"date_string", "enable_thinking", "bos_token"}


def test_a_message_field_that_is_none_is_no_field(tmp_path):
    template = "{% for m in messages %}{{ m.content }}{{ m.tool_calls is defined }}{% endfor %}"
    directory = write(tmp_path, chat_template=template)
    assert assert_same(directory, [{"role": "user", "content": "a", "tool_calls": None}])[0] == "aFalse"


SHOWS = "{{ messages[0].content }} "


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ({"chat_template": SHOWS + "config"}, {}, "hi config"),
        ({"chat_template": SHOWS + "config"}, {"chat_template.jinja": SHOWS + "jinja"}, "hi jinja"),
        ({}, {"chat_template.json": {"chat_template": SHOWS + "json"}, "chat_template.jinja": "{{ 1 }}"}, "1"),
        ({"chat_template": [{"name": "rag", "template": "x"}, {"name": "default", "template": SHOWS}]}, {}, "hi "),
        # Older models name their special tokens in a file of their own.
        ({"chat_template": "{{ sep_token }}"}, {"special_tokens_map.json": {"sep_token": "<|eot_id|>"}}, "<|eot_id|>"),
    ],
)
def test_the_template_is_looked_for_where_transformers_looks(tmp_path, config, files, expected):
    assert assert_same(write(tmp_path, files=files, **config), [{"role": "user", "content": "hi"}])[0] == expected


def test_a_processors_template_counts_before_the_tokenizers(tmp_path):
    files = {"chat_template.json": {"chat_template": "json"}}
    assert Tokenizer.load(write(tmp_path, files=files, chat_template="config")).chat_template == "json"


def test_several_templates_without_a_default_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r'tokenizer_config.json: none of its chat templates \(rag\) is named "default"'
    ):
        Tokenizer.load(write(tmp_path, chat_template=[{"name": "rag", "template": "x"}]))


def test_a_template_that_is_no_jinja_is_refused_with_file_and_line(tmp_path):
    files = {"chat_template.jinja": "{% for x in messages %}\n{{ x }"}
    with pytest.raises(ValueError, match=r"chat_template.jinja: the chat template is not valid Jinja, line 2"):
        Tokenizer.load(write(tmp_path, files=files))


@pytest.mark.parametrize(
    ("template", "error"),
    [
        (MISTRAL, "TemplateError: Conversation roles must alternate"),
        ("{{ messages[0].content + 1 }}", "TypeError: can only concatenate str"),
        ("{{ nothing.at.all }}", "UndefinedError: 'nothing' is undefined"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
    ],
)
def test_a_template_that_fails_is_named_with_its_error(tmp_path, template, error):
    tokenizer = Tokenizer.load(write(tmp_path, chat_template=template))
    with pytest.raises(ValueError, match=r"tokenizer_config.json: the chat template does not .* system, user: ") as it:
        tokenizer.render_chat(SYSTEM)
    assert error in str(it.value)


def test_asking_goes_through_the_template_where_there_is_one(tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path, chat_template=QWEN3))
    text, tokens = tokenizer.ask("1+1?", system="Be brief.", enable_thinking=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
        "<think>\n\n</think>\n\n"
    )
    assert tokens == tokenizer.encode(text)[1:]  # but for the BOS in front of plain text


def test_a_system_message_takes_the_place_of_the_conversations_own(tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path, chat_template=QWEN3))
    assert tokenizer.ask(SYSTEM, system="New.")[0] == tokenizer.ask(ASK, system="New.")[0]
    assert "You are terse." in tokenizer.ask(SYSTEM)[0]


def test_asking_without_a_template_is_plain_text_with_the_tokenizers_own_bos(tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path))
    assert tokenizer.chat_template == "" and tokenizer.chat_variables == frozenset()
    text, tokens = tokenizer.ask("1+1?", system="Be brief.")
    assert text == "Be brief.\n\n1+1?"
    assert tokens == tokenizer.encode(text) and tokens[0] == 0
    with pytest.raises(ValueError, match="no chat template; looked for chat_template.jinja, .*chat=plain"):
        tokenizer.render_chat(ASK)
    with pytest.raises(ValueError, match="a conversation of user, assistant, user needs a chat template"):
        tokenizer.ask(TALK)
