"""The text encoder of the embedded digits policy: a word's letters are its tokens.

Small enough to ship beside the policy, and of the same form as a real text encoder: it gives one
embedding per token for the joint attention and one pooled vector for the modulation.
"""

import torch
from torch import Tensor, nn

BLANK = 0  # token of an unused position behind the last letter; "a" is 1, "z" is 26


class WordEncoder(nn.Module):
    """Words of at most `max_letters` letters a to z, as embedding plus learned position.

    dim: width E of a token, the transformer's `joint_attention_dim` and `pooled_projection_dim`.
    max_letters: number of tokens L of every word; shorter words are filled with blanks, which the
        transformer attends to like any other token.
    """

    def __init__(self, dim: int = 32, max_letters: int = 5) -> None:
        super().__init__()
        self.letters = nn.Embedding(27, dim)
        self.positions = nn.Parameter(0.5 * torch.randn(max_letters, dim))

    def forward(self, words: list[str]) -> tuple[Tensor, Tensor]:
        """Token embeddings [B, L, E] and their mean over the tokens [B, E].

        Raises ValueError, naming the word, for an empty word, one that is too long, or any
        character other than a to z.
        """
        ids_BL = torch.tensor([self._token_ids(word) for word in words])
        tokens_BLE = self.letters(ids_BL.to(self.positions.device)) + self.positions
        return tokens_BLE, tokens_BLE.mean(dim=1)

    def _token_ids(self, word: str) -> list[int]:
        max_letters = len(self.positions)
        ids = [ord(letter) - ord("a") + 1 for letter in word]
        if not 1 <= len(ids) <= max_letters or not all(1 <= i <= 26 for i in ids):
            raise ValueError(
                f"prompt {word!r} cannot be encoded: this policy reads one word of 1 to "
                f"{max_letters} letters a to z, such as 'three'"
            )
        return ids + [BLANK] * (max_letters - len(ids))
