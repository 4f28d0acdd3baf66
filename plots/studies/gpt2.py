"""GPT-2 as `transformers` defines it, from a configuration and so without a download, over characters.

Its activation is `gelu_new`, GELU by tanh in several torch calls, of which autograd keeps four tensors. Dropout is 0:
then nothing but the derivative tells a few-bit run from the exact one.
"""

from typing import Any

from torch import Tensor, nn

from ...tables import FewbitError
from .settings import Size
from .text import VOCABULARY


class GPT2(nn.Module):
    """Scores for the next character after each one, by `transformers.GPT2LMHeadModel`.

    Args:
        size: of the model.

    Raises:
        FewbitError: `transformers` is not installed.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        transformers = _transformers()
        configuration = transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=size.context,
            n_embd=size.width,
            n_layer=size.depth,
            n_head=size.heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,  # those of the trained GPT-2 are beyond this vocabulary
            eos_token_id=None,
            use_cache=False,
        )
        self.model = transformers.GPT2LMHeadModel(configuration)

    def forward(self, text: Tensor) -> Tensor:
        """Return scores (batch, length, 128), float32, for ASCII codes (batch, length), int64; length ≤ context."""
        return self.model(text).logits


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise FewbitError("training GPT-2 needs transformers: pip install transformers") from error
    return transformers
