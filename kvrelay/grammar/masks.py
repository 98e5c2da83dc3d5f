"""The masks of allowed tokens of many outputs at once."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvrelay.grammar.matcher import Masks, Matcher

Row = tuple[Matcher, Sequence[int], int]  # matcher, its draft tokens, the row for the token after none of them


def fill_masks(rows: Iterable[Row], out: Masks) -> None:
    """Write the mask of each matcher's next token, and of the token after each of its draft tokens.

    The next token's mask goes to out[row], the one after draft i to out[row + 1 + i]. After an output's end, and
    behind a draft that the grammar refuses, only eos tokens are allowed. Other rows stay as they are.
    The matchers are of one GrammarCompiler. They stay where they are; one whose `problem` is set then allows eos alone.
    Releases the GIL in between.

    out: [R, ceil(vocabulary / 32)] int32, C-contiguous.
    """
    if not out.flags.c_contiguous or out.dtype != np.int32:
        raise ValueError("masks are C-contiguous int32")
    parsers = []
    for matcher, drafts, row in rows:
        if drafts or matcher.has_ended:
            out[row : row + 1 + len(drafts)] = end_mask(matcher.eos_ids, out.shape[1])
        if not matcher.has_ended:
            text = drafts[: matcher.num_before_end(drafts)]
            parsers.append((matcher.parser, list(text), row))
    if parsers:
        parsers[0][0].library.fill(parsers, out)


def end_mask(eos_ids: Iterable[int], num_words: int) -> NDArray[np.int32]:
    """The mask that allows the end alone, [num_words] int32."""
    mask = np.zeros(num_words, np.int32)
    for token_id in eos_ids:
        allow(mask, token_id)
    return mask


def allow(mask: NDArray[np.int32], token_id: int) -> None:
    """Set a token's bit in a mask."""
    mask.view(np.uint32)[token_id // 32] |= np.uint32(1 << (token_id % 32))
