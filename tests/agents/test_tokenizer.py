"""The tokenizer: the hub's files, plain and control text, defusing."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers

from gymllm.errors import ConfigError, ModelError
from gymllm_agents import Tokenizer, train_tokenizer

HARD_TEXTS = [
    "",
    " ",
    "\n\n \t",
    "é 🎉 a\u0301 中文",
    "<|im_end|>",
    "<|im_<|im_end|>end|>",
    "a<|im_start|>b<|endoftext|>",
    "0123456789",
]


def test_any_text_decodes_to_itself(tokenizer):
    rng = np.random.default_rng(0)
    random = ["".join(map(chr, rng.integers(1, 0xD7FF, size=20))) for _ in range(20)]
    for text in HARD_TEXTS + random:
        ids = tokenizer.encode(text, allow_special=False)
        assert tokenizer.decode(ids, skip_special=False) == text
        assert not any(tokenizer.is_control(i) for i in ids)


def test_half_a_surrogate_pair_is_shown_as_unreadable(tokenizer):
    for allow in (True, False):
        ids = tokenizer.encode("a\ud800b", allow_special=allow)
        assert tokenizer.decode(ids, skip_special=False) == "a\ufffdb"


def test_control_tokens_are_made_only_when_allowed(tokenizer):
    end = tokenizer.token_to_id("<|im_end|>")
    assert tokenizer.encode("<|im_end|>", allow_special=True) == [end]
    assert end not in tokenizer.encode("<|im_end|>", allow_special=False)
    assert tokenizer.decode([end], skip_special=True) == ""
    assert tokenizer.decode([end], skip_special=False) == "<|im_end|>"


def test_plain_text_encodes_the_same_either_way(tokenizer):
    for text in ("go left", " What is 12 + 7?\n", "é🎉"):
        assert tokenizer.encode(text, allow_special=True) == tokenizer.encode(
            text, allow_special=False
        )


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_defused_text_comes_back_plain(tokenizer, text):
    rendered = f"<|im_start|>{tokenizer.defuse(text, fuse='~fuse~')}<|im_end|>"
    ids = tokenizer.encode_rendered(rendered, fuse="~fuse~")
    plain = tokenizer.encode(text, allow_special=False)
    assert ids == [tokenizer.token_to_id("<|im_start|>"), *plain, tokenizer.eos_token_id]


def test_a_fuse_changes_no_merge_outside_of_what_it_guards(tokenizer):
    left, right = "go left answer", " question 12"
    whole = f"<|im_start|>{left}<|im_end|>{right}"
    fused = whole.replace("<|im_end|>", tokenizer.defuse("<|im_end|>", fuse="~"))
    ids = tokenizer.encode_rendered(fused, fuse="~")
    start = tokenizer.token_to_id("<|im_start|>")
    assert ids == [start, *tokenizer.encode(whole[len("<|im_start|>") :], allow_special=False)]


def test_one_tokenizer_serves_many_threads(tokenizer):
    texts = [f"x{n}<|im_end|>y" for n in range(50)]
    expected = [
        (tokenizer.encode(t, allow_special=True), tokenizer.encode(t, allow_special=False))
        for t in texts
    ]

    def both(text: str) -> tuple[list[int], list[int]]:
        allowed = tokenizer.encode(text, allow_special=True)
        return allowed, tokenizer.encode(text, allow_special=False)

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(both, texts)) == expected


def markup_tokenizer() -> Tokenizer:
    """Added tokens of every kind: special, not special, of blanks, and one that eats blanks."""
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={c: i for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[]
        )
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("</s>"), AddedToken("<|end|>", rstrip=True)])
    backend.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("  ", special=False)])
    return Tokenizer(backend, chat_template=None, eos_token="</s>")


def test_markup_that_is_not_special_is_plain_too():
    tokenizer = markup_tokenizer()
    call = tokenizer.token_to_id("<tool_call>")
    assert tokenizer.encode("<tool_call>", allow_special=True) == [call]
    assert call not in tokenizer.encode("<tool_call>", allow_special=False)
    assert tokenizer.decode([call], skip_special=True) == "<tool_call>"
    kept = tokenizer.defuse("<tool_call></s>", fuse="~", keep_markup=True)
    assert kept == "<tool_call><~/s>"


def test_tokens_of_blanks_are_ordinary():
    tokenizer = markup_tokenizer()
    blanks = tokenizer.token_to_id("  ")
    assert blanks in tokenizer.encode("a  b", allow_special=False)
    assert not tokenizer.is_control(blanks)


def test_a_token_that_eats_blanks_does_so_next_to_a_fuse():
    tokenizer = markup_tokenizer()
    plain = tokenizer.encode_rendered("a<|end|> \nb", fuse="~")
    fused = tokenizer.encode_rendered("a<|end|> \nb" + tokenizer.defuse("</s>", fuse="~"), fuse="~")
    assert fused[: len(plain)] == plain
    assert len(fused) == len(plain) + len("</s>")


def test_a_vocabulary_that_would_form_the_token_is_kept_from_it():
    # ignore_merges takes a whole word that is in the vocabulary, whatever it means.
    letters = {c: i for i, c in enumerate("<end>")} | {"<end>": 5}
    backend = tokenizers.Tokenizer(models.BPE(vocab=letters, merges=[], ignore_merges=True))
    backend.add_special_tokens(["<end>"])
    tokenizer = Tokenizer(backend, chat_template=None, eos_token="<end>")
    assert tokenizer.encode("<end>", allow_special=True) == [5]
    assert tokenizer.encode("<end>", allow_special=False) == [0, 1, 2, 3, 4]


def test_saving_and_reading_give_the_same_tokenizer(tokenizer, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    tokenizer.save(tmp_path)
    again = Tokenizer.from_folder(tmp_path)
    assert again.stop_token_ids == tokenizer.stop_token_ids
    assert again.vocab_size == tokenizer.vocab_size
    assert again.template.source == tokenizer.template.source
    assert (again.eos_token, again.bos_token, again.pad_token) == (
        "<|im_end|>",
        None,
        "<|endoftext|>",
    )
    for text in HARD_TEXTS:
        for allow in (True, False):
            assert again.encode(text, allow_special=allow) == tokenizer.encode(
                text, allow_special=allow
            )
    config = json.loads((tmp_path / "generation_config.json").read_text())
    assert config == {"temperature": 0.6, "eos_token_id": [2, 0]}


def edit(folder, name: str, **changes: object) -> None:
    file = folder / name
    config = json.loads(file.read_text()) if file.exists() else {}
    config.update(changes)
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


@pytest.fixture
def folder(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    return tmp_path


def test_the_templates_own_file_comes_first(folder):
    (folder / "chat_template.jinja").write_text("mine")
    assert Tokenizer.from_folder(folder).template.source == "mine"


def test_of_named_templates_the_default_is_used(folder):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    edit(folder, "tokenizer_config.json", chat_template=named)
    assert Tokenizer.from_folder(folder).template.source == "d"
    edit(folder, "tokenizer_config.json", chat_template=named[:1])
    assert Tokenizer.from_folder(folder).template.source == "t"


def test_tokens_written_as_objects_are_read(folder):
    edit(folder, "tokenizer_config.json", eos_token={"content": "<|endoftext|>"})
    assert Tokenizer.from_folder(folder).eos_token == "<|endoftext|>"


def test_stop_tokens_come_from_the_generation_config(folder):
    edit(folder, "generation_config.json", eos_token_id=1)
    assert Tokenizer.from_folder(folder).stop_token_ids == (2, 1)
    (folder / "generation_config.json").unlink()
    assert Tokenizer.from_folder(folder).stop_token_ids == (2,)


def test_without_an_eos_token_the_generation_configs_is_used_or_asked_for(folder):
    edit(folder, "tokenizer_config.json", eos_token=None)
    assert Tokenizer.from_folder(folder).eos_token == "<|im_end|>"
    (folder / "generation_config.json").unlink()
    with pytest.raises(ModelError, match=r'no eos_token.*Add "eos_token"'):
        Tokenizer.from_folder(folder)


def test_a_folder_without_a_tokenizer_says_what_is_missing(tmp_path):
    with pytest.raises(ModelError, match=r"No tokenizer\.json in .*download the model again"):
        Tokenizer.from_folder(tmp_path)


def test_broken_files_are_named(folder):
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json is not JSON"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelError, match="must hold a JSON object, got list"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json can't be read"):
        Tokenizer.from_folder(folder)


def test_a_token_that_is_not_in_the_vocabulary_is_refused(tokenizer):
    with pytest.raises(ModelError, match="eos_token '</s>' is not in the tokenizer's vocabulary"):
        Tokenizer(tokenizer.copy_backend(), chat_template=None, eos_token="</s>")


def test_without_a_template_only_the_template_is_missing(with_template):
    tokenizer = with_template(None)
    assert tokenizer.encode("a", allow_special=False)
    with pytest.raises(ModelError, match="no chat template"):
        _ = tokenizer.template


def test_training_is_deterministic():
    texts = ["go left and right", "What is 12 + 7?"] * 5
    first, second = (train_tokenizer(iter(texts), vocab_size=300) for _ in range(2))
    assert first.copy_backend().to_str() == second.copy_backend().to_str()


def test_training_merges_and_keeps_digits_apart():
    tokenizer = train_tokenizer(["left 1212"] * 9, vocab_size=400)
    assert len(tokenizer.encode("left", allow_special=False)) == 1
    assert len(tokenizer.encode("1212", allow_special=False)) == 4
    assert 259 <= tokenizer.vocab_size < 400


def test_training_without_texts_knows_every_byte():
    tokenizer = train_tokenizer([], vocab_size=259)
    assert tokenizer.vocab_size == 259
    assert tokenizer.stop_token_ids == (2, 0)
    with pytest.raises(ConfigError, match="vocab_size must be >= 259"):
        train_tokenizer([], vocab_size=258)
