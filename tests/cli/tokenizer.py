"""A tokenizer whose words are the names of its ids, `t00`, `t01`, ..."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def word_tokenizer(size: int) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({f"t{i:02d}": i for i in range(size)}, unk_token="t00"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="t00", pad_token="t00")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return tokenizer
